"""Edits of functions over the wire: attention, functions that write in place, results with names."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trocar
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom, rebuilt

ATTENTION = "fn:scaled_dot_product_attention"
ROWS = noise(2, 5, 8)


class Steps(nn.Module):
    """Attention of two heads, a shortcut that is added in place by a statement, and a maximum by name."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2).clone()
        mixed.add_(x)
        found: torch.Tensor = mixed.max(dim=1).values
        return found


@pytest.fixture(scope="module")
def client() -> Iterator[trocar.Client]:
    models: dict[str, Any] = {
        "steps": custom(Steps, (5, 8)),
        "in_place": custom(InPlace, (5, 8)),
        "differentiable": custom(Differentiable, (5, 8)),
    }
    with running_server(models=models, device="cpu") as running, trocar.connect(running.address) as connected:
        yield connected


def by_hand(*, scores: float = 1, out: float = 1, shortcut: float = 1) -> Array:
    """Compute the model step by step, with the values at some places multiplied."""
    x = torch.from_numpy(ROWS)
    with torch.inference_mode():
        parts = rebuilt(Steps).project(x).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts)
        weights = (query @ key.transpose(-2, -1) / 2).softmax(-1) * scores
        mixed = (weights @ value * out).transpose(1, 2).flatten(2) + x * shortcut
        found: Array = mixed.amax(dim=1).numpy()
    return found


def extracted(client: trocar.Client, *edits: Any) -> Array:
    found: Array = client.extract("steps", ROWS, ["/out"], edits=list(edits))["/out"]
    return found


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_edits_of_scores_and_output_are_both_made(
    client: trocar.Client, order: Any, is_reversed: bool
) -> None:
    edits = [
        trocar.edit(f"{ATTENTION}/scores", "scale", 3.0, order=order),
        trocar.edit(ATTENTION, "scale", 2.0),
    ]
    found = extracted(client, *(edits[::-1] if is_reversed else edits))
    np.testing.assert_allclose(found, by_hand(scores=3, out=2), rtol=1e-5, atol=1e-6)


def test_an_edit_of_scores_after_their_taps_reaches_a_tap_of_the_output(client: trocar.Client) -> None:
    edit = trocar.edit(f"{ATTENTION}/scores", "scale", 2.0, order="after")
    plain = client.extract("steps", ROWS, [ATTENTION])[ATTENTION]
    found = client.extract("steps", ROWS, [ATTENTION], edits=edit)[ATTENTION]
    np.testing.assert_allclose(found, 2 * plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("tap", "place"), [("scores", ""), ("logits", "/scores")])
def test_an_edit_behind_the_tapped_port_of_attention_is_refused(
    client: trocar.Client, tap: str, place: str
) -> None:
    edit = trocar.edit(f"{ATTENTION}{place}", "zero")
    with pytest.raises(trocar.errors.EditNotReachedError, match=f"the pass ends at '{ATTENTION}/{tap}'"):
        client.extract("steps", ROWS, [f"{ATTENTION}/{tap}"], edits=edit)


class InPlace(nn.Module):
    """Functions that write to an argument, as statements and by results, and one that returns it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.first(x)
        alias = value.view(-1)  # sees every write
        value.add_(x)
        F.relu(value, inplace=True)
        value = F.leaky_relu(value - 0.5, 0.1, inplace=True)
        whole = value.to(torch.float32)  # the very tensor: no write
        torch.mul(value, 2.0, out=alias.view_as(value))
        wider = value.view_as(value)
        wider.unsqueeze_(0)
        found: torch.Tensor = self.last(alias.view_as(x) + whole + wider[0])
        return found


class Differentiable(InPlace):
    """Without the function that has no derivative, as it writes to `out`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.first(x)
        value.add_(x)
        F.relu(value, inplace=True)
        value = F.leaky_relu(value - 0.5, 0.1, inplace=True)
        found: torch.Tensor = self.last(value)
        return found


Change = Callable[[torch.Tensor], torch.Tensor]


def in_place_by_hand(model: InPlace, x: torch.Tensor, edited: str, change: Change) -> dict[str, torch.Tensor]:
    """Compute it without a write in place, with one value changed; returns all values by place."""
    values: dict[str, torch.Tensor] = {}

    def at(place: str, value: torch.Tensor) -> torch.Tensor:
        values[place] = change(value) if place == edited else value
        return values[place]

    added = at("fn:add_", at("fn:add_/in[0]", model.first(x)) + at("fn:add_/in[1]", x))
    shifted = at("fn:relu", at("fn:relu/in[0]", added).relu()) - 0.5
    value = at("fn:leaky_relu", F.leaky_relu(at("fn:leaky_relu/in[0]", shifted), 0.1))
    if isinstance(model, Differentiable):
        at("/out", model.last(value))
        return values
    whole = at("fn:to", at("fn:to/in[0]", value))
    doubled = at("fn:mul", at("fn:mul/in[0]", value) * 2.0)
    at("/out", model.last(doubled + whole + value))
    return values


FUNCTIONS = [f"fn:{name}" for name in ("add_", "relu", "leaky_relu", "to", "mul")]


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("place", [*FUNCTIONS, *(f"{name}/in[0]" for name in FUNCTIONS), "fn:add_/in[1]"])
def test_functions_that_write_in_place_are_edited(client: trocar.Client, place: str, order: Any) -> None:
    taps = [*FUNCTIONS, "/out"]
    edit = trocar.edit(place, "scale", -3.0, order=order)
    found = client.extract("in_place", ROWS, taps, edits=edit)
    with torch.inference_mode():
        expected = in_place_by_hand(
            rebuilt(InPlace), torch.from_numpy(ROWS), place, lambda value: value * -3.0
        )
    if order == "after" and place in expected:
        expected[place] = expected[place] / -3.0
    for tap in taps:
        np.testing.assert_allclose(found[tap], expected[tap], rtol=1e-5, atol=1e-6, err_msg=tap)


@pytest.mark.parametrize("place", [*FUNCTIONS[:3], *(f"{name}/in[0]" for name in FUNCTIONS[:3])])
def test_gradients_go_through_edits_of_functions_that_write_in_place(
    client: trocar.Client, place: str
) -> None:
    """Autograd saves what `clamp` takes, which the call and the edit write to."""
    wanted = "first/param_grad(weight)"
    edit = trocar.edit(place, "clamp", low=-0.2, high=0.3)
    objective = trocar.value("/out", reduce="sum")
    found = client.extract("differentiable", ROWS, [wanted, "/out"], edits=edit, of=objective)
    model = rebuilt(Differentiable)
    values = in_place_by_hand(model, torch.from_numpy(ROWS), place, lambda value: value.clamp(-0.2, 0.3))
    values["/out"].sum().backward()
    np.testing.assert_allclose(found["/out"], values["/out"].detach(), rtol=1e-5, atol=1e-6)
    assert model.first.weight.grad is not None
    np.testing.assert_allclose(found[wanted], model.first.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", ["fn:unsqueeze_", "fn:unsqueeze_/in[0]", "fn:mul/in(out)"])
def test_what_cannot_be_edited_in_place_is_refused(client: trocar.Client, place: str) -> None:
    with pytest.raises(trocar.errors.EditNotPossibleError, match=r"in place|reads nothing"):
        client.extract("in_place", ROWS, ["/out"], edits=trocar.edit(place, "scale", 1.0))


def test_what_a_function_in_place_only_reads_is_edited(client: trocar.Client) -> None:
    found = extracted(client, trocar.edit("fn:add_/in[1]", "scale", 2.0))
    np.testing.assert_allclose(found, by_hand(shortcut=2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_result_that_a_model_takes_by_name_is_edited(client: trocar.Client, factor: float) -> None:
    found = extracted(client, trocar.edit("fn:max[0]", "scale", factor))
    np.testing.assert_allclose(found, factor * by_hand(), rtol=1e-5, atol=1e-6)
