"""Edits that a pass does not come to: refused before anything is computed, edit and end named."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.support.oracles.oracle import noise
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom


class Chain(nn.Module):
    """Three layers one after another, a branch that never runs, and a function between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.first(x))
        x = torch.sigmoid(self.second(x))
        found: torch.Tensor = self.act(self.third(torch.tanh(x)))
        return found


ROWS = noise(4, 3)


@pytest.fixture(scope="module")
def client() -> Iterator[trocar.Client]:
    models: dict[str, Any] = {"chain": custom(Chain, (3,))}
    with running_server(models=models, device="cpu") as running, trocar.connect(running.address) as connected:
        yield connected


def zero(selector: str, **options: Any) -> Any:
    return trocar.edit(selector, "zero", **options)


@pytest.mark.parametrize(
    ("tap", "edit", "words"),
    [
        ("second", zero("third"), "'third'.*ends at 'second'"),
        ("second", zero("third/in"), "'third/in.*ends at 'second'"),
        ("second", zero("second", order="after"), "'second'.*ends at 'second'"),
        ("second/in", zero("second"), "'second'.*ends at 'second/in"),
        ("act@0", zero("act@1"), "'act@1'.*ends at 'act@0'"),
        ("second", zero("third/param(weight)"), "third.*ends at 'second'"),
        ("third", zero("unused/param(weight)"), "unused.*no operation of the pass reads it"),
        ("second", zero("fn:sigmoid"), "sigmoid.*ends at 'second'"),
        ("fn:sigmoid", zero("third"), "'third'.*ends at 'fn:sigmoid'"),
        ("fn:sigmoid", zero("fn:tanh"), "tanh.*ends at 'fn:sigmoid'"),
        ("second/param(weight)", zero("second"), "'second'.*no pass runs"),
    ],
)
def test_an_edit_behind_the_last_tap_is_refused(
    client: trocar.Client, tap: str, edit: Any, words: str
) -> None:
    for call in (client.extract, client.plan):
        with pytest.raises(trocar.errors.EditNotReachedError, match=words):
            call("chain", ROWS, taps=[tap], edits=[edit])
    with pytest.raises(trocar.errors.EditNotReachedError):
        list(client.extract_stream("chain", [ROWS], taps=[tap], edits=[edit]))


@pytest.mark.parametrize(
    ("tap", "edit"),
    [
        ("second", zero("second")),
        ("third", zero("second", order="after")),
        ("fn:sigmoid", zero("second")),
        ("fn:tanh", zero("fn:sigmoid")),
        ("third", zero("fn:tanh")),
        ("first/param(weight)", zero("first/param(weight)")),
        ("second", zero("second/param(weight)")),
    ],
)
def test_an_edit_that_the_pass_comes_to_changes_what_is_tapped(
    client: trocar.Client, tap: str, edit: Any
) -> None:
    plain, edited = (client.extract("chain", ROWS, taps=[tap], edits=e) for e in ([], [edit]))
    assert not any(np.array_equal(plain[name], edited[name]) for name in plain)


def test_of_a_pattern_the_reply_names_what_was_edited(client: trocar.Client) -> None:
    maps = client.extract("chain", ROWS, taps=["second"], edits=[zero("*:Linear")])
    assert maps.edit_expansions == {"*:Linear": ("first", "second")}
    maps = client.extract("chain", ROWS, taps=["second"], edits=[zero("act@*")])
    assert maps.edit_expansions == {"act@*": ("act@0",)}


@pytest.mark.parametrize(
    ("at", "edit", "is_taken"),
    [
        (["third"], zero("first/grad_out"), False),
        (["first"], zero("third/grad_out"), True),
        (["first"], zero("first/grad_out"), True),
        (["first/param_grad(weight)"], zero("second/param_grad(weight)"), False),
        (["first/param_grad(weight)"], zero("first/param_grad(weight)"), True),
        (["first/param_grad(weight)"], zero("second/grad_out"), True),
        (["second"], zero("unused/param(weight)"), False),
    ],
)
def test_an_edit_of_a_gradient_has_to_reach_one_that_is_wanted(
    client: trocar.Client, at: list[str], edit: Any, is_taken: bool
) -> None:
    def call() -> Any:
        return client.gradients("chain", ROWS, of=trocar.logit(0), at=at, edits=[edit])

    if not is_taken:
        with pytest.raises(trocar.errors.EditNotReachedError):
            call()
        return
    assert all(not value.any() for value in call().values())


@pytest.mark.parametrize("edit", [zero("first"), zero("first/param(weight)"), zero("fn:sigmoid")])
def test_an_edit_before_the_start_is_refused(client: trocar.Client, edit: Any) -> None:
    value = client.extract("chain", ROWS, taps=["fn:tanh"])["fn:tanh"]
    with pytest.raises(trocar.errors.StartNotPossibleError, match="before it"):
        client.extract("chain", value, taps=["third"], start_at="third/in[0]", edits=[edit])


def test_stored_edits_have_to_be_reached_by_the_request_that_names_them(client: trocar.Client) -> None:
    client.store_edits("chain", "late", [zero("third")])
    assert client.extract("chain", ROWS, taps=["act@1"], edits=["late"]) is not None
    with pytest.raises(trocar.errors.EditNotReachedError, match="'third'"):
        client.extract("chain", ROWS, taps=["second"], edits=["late"])


@pytest.mark.parametrize(
    "options",
    [{"samples": [4]}, {"samples": [-5]}, {"channels": [3]}, {"index": np.s_[4:]}, {"index": np.s_[:, 3:]}],
)
def test_an_edit_of_samples_or_channels_that_are_not_there_is_refused(
    client: trocar.Client, options: dict[str, Any]
) -> None:
    with pytest.raises(trocar.errors.EditShapeMismatchError):
        client.extract("chain", ROWS, taps=["third"], edits=[zero("second", **options)])


def test_a_mask_that_selects_nothing_is_refused(client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.EditShapeMismatchError, match="mask"):
        client.extract("chain", ROWS, taps=["third"], edits=[zero("second", mask=np.zeros((4, 3), bool))])
