"""Rows are called independent only where torch computes the same for a row in any company."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.support.files.scale import SEED, count
from tests.unit.engine.compiled.backends.nets import out
from tests.unit.surgery.rows.passes import APART, MIXED, SHAPE, Compute, computing
from trocar_server.engine.compiled.backends.graph_tracing import why_rows_mix
from trocar_server.engine.compiled.backends.recipe import ArgumentSpec, Recipe

PROGRAMS = count(40, "TROCAR_ROW_PROGRAMS")
RECIPE = Recipe((ArgumentSpec(torch.float32, SHAPE),), (out("last"),))


def why(compute: Compute, *, is_training: bool = False) -> str:
    return why_rows_mix(computing(compute, is_training=is_training), RECIPE)


def rows(number: int, seed: int) -> Tensor:
    return torch.rand(number, *SHAPE, generator=torch.Generator().manual_seed(seed))


def is_apart(model: nn.Module) -> bool:
    """Whether torch computes the same for rows alone, before, behind and between others."""
    own = rows(2, 1)
    alone = torch.cat([model(row[None].clone()) for row in own])
    for before, behind in ((0, 0), (1, 0), (0, 3), (4, 5)):
        company = torch.cat([rows(before, 2) * 9, own, rows(behind, 3) * 9])
        found = model(company)
        if len(found) != before + 2 + behind:
            return False
        if not torch.allclose(found[before : before + 2], alone, rtol=1e-4, atol=1e-5):
            return False
    return True


@pytest.mark.parametrize("name", APART)
def test_rows_that_are_apart_are_proved(name: str) -> None:
    assert is_apart(computing(APART[name]))
    assert why(APART[name]) == ""


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_are_not_are_never_proved(name: str) -> None:
    assert why(MIXED[name]) != ""


def test_a_norm_in_training_mode_is_not_proved() -> None:
    assert why(APART["norm"], is_training=True) != ""


def test_the_reason_names_the_operator() -> None:
    assert why(MIXED["cumsum"]) == "aten.cumsum.default in 'model': it goes along the rows"


Step = Callable[[Tensor], Tensor]
STEPS: Sequence[Step] = (
    lambda x: x * 2 - 1,
    lambda x: x + x.flip(-1),
    lambda x: x.transpose(1, 2),
    lambda x: x.transpose(0, 1),
    lambda x: x.permute(2, 0, 1),
    lambda x: x.flatten(0, 1)[:, None],
    lambda x: x.flatten(1)[:, None],
    lambda x: x.reshape(x.shape[1], -1, x.shape[2]),
    lambda x: x.softmax(-1),
    lambda x: x.softmax(1),
    lambda x: x.cumsum(0),
    lambda x: x - x.mean(1, keepdim=True),
    lambda x: x - x.mean(0, keepdim=True),
    lambda x: torch.cat([x, x], 1),
    lambda x: torch.cat([x, x], 0),
    lambda x: x @ x.transpose(1, 2),
    lambda x: torch.einsum("aij,bkj->aibk", x, x)[:, 0],
    lambda x: x[:, :1] + x,
    lambda x: x[:1] + x,
    lambda x: x.roll(1, 1),
    lambda x: x.unsqueeze(1).expand(-1, 2, -1, -1).flatten(1, 2),
    lambda x: x.unsqueeze(0).expand(2, -1, -1, -1).flatten(0, 1),
    lambda x: x.repeat(1, 2, 1),
    lambda x: x + torch.zeros(x.shape[0], 1, 1),
    lambda x: x * x.amax(),
    lambda x: x.sort(1).values,
)


@pytest.mark.parametrize("number", range(PROGRAMS))
def test_random_programs_that_are_proved_are_apart(number: int) -> None:
    """Most bring the rows somewhere else and some back: what is proved, torch computes apart."""
    chance = random.Random(1000 * SEED + number)
    steps = [chance.choice(STEPS) for _ in range(chance.randrange(1, 6))]

    def compute(_: nn.Module, x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    if why(compute) == "":
        assert is_apart(computing(compute))


@pytest.mark.parametrize("number", range(len(STEPS)))
def test_of_the_steps_alone_as_many_are_proved_as_are_apart(number: int) -> None:
    """So that random programs are proved at all, and fail where a rule is too generous."""

    def compute(_: nn.Module, x: Tensor) -> Tensor:
        return STEPS[number](x)

    try:
        apart = is_apart(computing(compute))
    except RuntimeError:  # torch can compute it for one number of rows alone
        apart = False
    assert (why(compute) == "") is apart
