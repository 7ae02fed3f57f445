"""Edits at modules that write to their input, whether or not the model uses what they return."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom, rebuilt

ROWS = noise(2, 3)
Change = Callable[[torch.Tensor], torch.Tensor]


class Stated(nn.Module):
    """Calls an in-place module as a statement, and reads its input before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        before = h.sum()
        self.relu(h)
        result: torch.Tensor = self.last(h) + before
        return result


class Assigned(Stated):
    """Goes on with what the module returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        before = h.sum()
        result: torch.Tensor = self.last(self.relu(h)) + before
        return result


class Both(Stated):
    """Goes on with what the module returns and with its input: one tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        before = h.sum()
        result: torch.Tensor = self.last((self.relu(h) + h) / 2) + before
        return result


class _Halves(nn.Module):
    """Writes to its input, and returns it in a dict."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"half": x.relu_()}


class InDict(Stated):
    """Calls a module that returns its changed input in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = _Halves()  # type: ignore[assignment]


class _ByData(nn.Module):
    """Writes to its input unseen by autograd's counters of versions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.data.clamp_(min=0)
        return x


class Unseen(Stated):
    """Calls a module that writes to the data of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = _ByData()  # type: ignore[assignment]


class _Silent(nn.Module):
    """Writes to its input, and returns nothing of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu_() * 0


class Silent(Stated):
    """Calls a module that returns another value than the one that it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = _Silent()  # type: ignore[assignment]


class Unwritten(nn.Module):
    """Calls modules that return their very input, or another value, and goes on with their input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.same = nn.Identity()
        self.other = nn.ReLU()
        self.late = nn.ReLU(inplace=True)  # so that the input of the others is overwritten later

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.same(h)
        self.other(h)
        result: torch.Tensor = self.late(h)
        return result


class ByData(Stated):
    """Reads its data, so that nothing is known before the pass of what it overwrites."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() < 1e9 else x


KINDS: dict[str, type[nn.Module]] = {
    "stated": Stated,
    "assigned": Assigned,
    "both": Both,
    "by-data": ByData,
    "dict": InDict,
    "unseen": Unseen,
}


@pytest.fixture(scope="module")
def client() -> Iterator[trocar.Client]:
    models: dict[str, Any] = {
        **{name: custom(kind) for name, kind in KINDS.items()},
        "silent": custom(Silent),
        "unwritten": custom(Unwritten),
    }
    with running_server(models=models, device="cpu") as running, trocar.connect(running.address) as connected:
        yield connected


def same(value: torch.Tensor) -> torch.Tensor:
    return value


def by_hand(enter: Change = same, leave: Change = same, x: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `Stated` step by step, without anything in place."""
    model = rebuilt(Stated)
    h = model.first(torch.from_numpy(ROWS) if x is None else x)
    result: torch.Tensor = model.last(leave(torch.relu(enter(h)))) + h.sum()
    return result


def close(found: Array, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-5, atol=1e-6)


def relu_out(model_id: str) -> str:
    return 'relu["half"]' if model_id == "dict" else "relu"


Order = Literal["before", "after"]


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("model_id", KINDS)
def test_an_edited_input_is_what_the_module_changes(
    client: trocar.Client, model_id: str, order: Order
) -> None:
    edit = trocar.edit("relu/in", "scale", -10.0, order=order)
    found = client.extract(model_id, ROWS, ["/out", "relu/in", relu_out(model_id)], edits=edit)
    close(found["/out"], by_hand(enter=lambda h: -10 * h))
    h = rebuilt(Stated).first(torch.from_numpy(ROWS))
    close(found["relu/in"], h if order == "after" else -10 * h)
    close(found[relu_out(model_id)], torch.relu(-10 * h))


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("model_id", KINDS)
def test_an_edited_output_is_what_the_model_goes_on_with(
    client: trocar.Client, model_id: str, order: Order
) -> None:
    place = relu_out(model_id)
    found = client.extract(
        model_id, ROWS, ["/out", place, "first"], edits=trocar.edit(place, "add", 3.0, order=order)
    )
    close(found["/out"], by_hand(leave=lambda h: h + 3))
    h = rebuilt(Stated).first(torch.from_numpy(ROWS))
    close(found["first"], h)
    close(found[place], torch.relu(h) if order == "after" else torch.relu(h) + 3)


def test_edits_before_and_after_the_taps_all_reach_the_model(client: trocar.Client) -> None:
    edits = [
        trocar.edit("relu/in", "scale", -1.0),
        trocar.edit("relu/in", "add", 1.0, order="after"),
        trocar.edit("relu", "scale", 2.0),
        trocar.edit("relu", "add", 5.0, order="after"),
    ]
    found = client.extract("stated", ROWS, ["/out", "relu"], edits=edits)
    close(found["/out"], by_hand(enter=lambda h: 1 - h, leave=lambda h: 2 * h + 5))
    h = rebuilt(Stated).first(torch.from_numpy(ROWS))
    close(found["relu"], 2 * torch.relu(1 - h))


def test_what_a_module_writes_and_does_not_return_is_of_the_edited_input(client: trocar.Client) -> None:
    found = client.extract("silent", ROWS, "/out", edits=trocar.edit("relu/in", "scale", -10.0))
    close(found["/out"], by_hand(enter=lambda h: -10 * h))
    found = client.extract("silent", ROWS, "/out", edits=trocar.edit("relu", "add", 1.0))
    close(found["/out"], by_hand())  # the model ignores what is edited


@pytest.mark.parametrize("port", ["", "/in"])
@pytest.mark.parametrize("path", ["same", "other"])
def test_a_module_that_writes_nothing_leaves_the_models_own_value(
    client: trocar.Client, path: str, port: str
) -> None:
    found = client.extract("unwritten", ROWS, "/out", edits=trocar.edit(path + port, "scale", -1.0))
    plain = client.extract("unwritten", ROWS, "/out")
    assert np.array_equal(found["/out"], plain["/out"])


@pytest.mark.parametrize("model_id", ["stated", "assigned", "both"])
def test_gradients_go_through_the_edit(client: trocar.Client, model_id: str) -> None:
    edits = [trocar.edit("relu/in", "scale", -2.0), trocar.edit("relu", "scale", 3.0)]
    taps = ["first/grad_in", "relu/grad_in", "relu/grad_out"]
    found = client.extract(model_id, ROWS, taps, of=trocar.logit(1), edits=edits)
    leaf = torch.from_numpy(ROWS).requires_grad_()
    inner: dict[str, torch.Tensor] = {}

    def enter(h: torch.Tensor) -> torch.Tensor:
        inner["in"] = -2 * h
        inner["in"].retain_grad()
        return inner["in"]

    def leave(h: torch.Tensor) -> torch.Tensor:
        inner["out"] = 3 * h
        inner["out"].retain_grad()
        return inner["out"]

    by_hand(enter, leave, leaf)[:, 1].sum().backward()
    wanted = {"first/grad_in": leaf, "relu/grad_in": inner["in"], "relu/grad_out": inner["out"]}
    for name, tensor in wanted.items():
        assert tensor.grad is not None
        close(found[name], tensor.grad)


@pytest.mark.parametrize("place", ["relu/in", "relu"])
@pytest.mark.parametrize("model_id", ["stated", "assigned", "both"])
def test_what_an_edit_keeps_for_its_derivative_stays(
    client: trocar.Client, model_id: str, place: str
) -> None:
    """Autograd saves what `clamp` takes, which the module and the edit write to."""
    edit = trocar.edit(place, "clamp", low=-0.1, high=0.1)
    found = client.extract(model_id, ROWS, "first/grad_in", of=trocar.logit(1), edits=edit)
    leaf = torch.from_numpy(ROWS).requires_grad_()

    def change(h: torch.Tensor) -> torch.Tensor:
        return h.clamp(-0.1, 0.1)

    enter, leave = (change, same) if place == "relu/in" else (same, change)
    by_hand(enter, leave, leaf)[:, 1].sum().backward()
    assert leaf.grad is not None
    close(found["first/grad_in"], leaf.grad)


@pytest.mark.parametrize("taps", [["relu/grad_in"], ["**:ReLU/grad_in"], ["relu/grad_in", "first/grad_in"]])
@pytest.mark.parametrize("model_id", ["stated", "assigned", "both", "by-data"])
def test_what_a_module_overwrites_has_a_gradient(
    client: trocar.Client, model_id: str, taps: list[str]
) -> None:
    found = client.extract(model_id, ROWS, taps, of=trocar.logit(1))
    leaf = torch.from_numpy(ROWS).requires_grad_()
    inner: list[torch.Tensor] = []

    def enter(h: torch.Tensor) -> torch.Tensor:
        inner.append(h.clone())  # the gradient of this module alone, not of `before`
        return inner[0]

    score = by_hand(enter, x=leaf)[:, 1].sum()
    at_relu, at_first = torch.autograd.grad(score, [*inner, leaf])
    close(found["relu/grad_in"], at_relu)
    assert len(found) == len(taps)
    if len(taps) > 1:
        close(found["first/grad_in"], at_first)
