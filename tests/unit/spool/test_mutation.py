"""A spool and `allow_mutation_on_saved_tensors`, one within the other: gradients as torch alone has them."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu

from tests.unit.spool.steps import open_spool, wait_until_written
from trocar_server.spool import SavedTensorChangedError, Spool

Step = Callable[[torch.Tensor, nn.Parameter], tuple[torch.Tensor, list[torch.Tensor]]]
"""Returns a loss, and what is changed in place before its backward pass."""


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, 6000, dtype=torch.float64).reshape(60, 100).requires_grad_()


def input_saved(x: torch.Tensor, _: nn.Parameter) -> tuple[torch.Tensor, list[torch.Tensor]]:
    made = x * 3
    return made.pow(3).sum(), [made]


def output_saved(x: torch.Tensor, _: nn.Parameter) -> tuple[torch.Tensor, list[torch.Tensor]]:
    made = x.exp()
    return (made * made).sum(), [made]


def view_saved(x: torch.Tensor, _: nn.Parameter) -> tuple[torch.Tensor, list[torch.Tensor]]:
    made = x * 2
    return made[:, :20].T.pow(2).sum() + made.sin().sum(), [made]


def parameter_saved(x: torch.Tensor, weight: nn.Parameter) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return (x @ weight).square().sum(), [weight]


def small_saved(x: torch.Tensor, _: nn.Parameter) -> tuple[torch.Tensor, list[torch.Tensor]]:
    factor = torch.full((1,), 2.0, dtype=torch.float64)
    return (x * factor).square().sum(), [factor]


def saved_at_two_versions(x: torch.Tensor, _: nn.Parameter) -> tuple[torch.Tensor, list[torch.Tensor]]:
    made = torch.ones(60, 100, dtype=torch.float64)
    first = x * made
    made.mul_(3)
    return (first * (x * made)).sum(), [made]


STEPS = [input_saved, output_saved, view_saved, parameter_saved, small_saved, saved_at_two_versions]


@pytest.fixture(params=[0, 1 << 30], ids=["on disk", "in memory"])
def spool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Spool]:
    with open_spool(tmp_path, request.param, min_bytes=64) as opened:
        yield opened


def gradients(step: Step, spool: Spool | None, is_outside: bool, is_late: bool = False) -> list[torch.Tensor]:
    """Return the gradients of a step whose saved tensors are changed before backward."""
    x, weight = leaf(), nn.Parameter(torch.linspace(0, 1, 1000, dtype=torch.float64).reshape(100, 10))
    outer = spool or nullcontext() if is_outside else allow_mutation_on_saved_tensors()
    inner = allow_mutation_on_saved_tensors() if is_outside else spool or nullcontext()
    with outer, inner:
        loss, changed = step(x, weight)
        if spool is not None and is_late:
            wait_until_written(spool)
        for tensor in changed:
            with torch.no_grad():
                tensor.mul_(-7)
        loss.backward()
    return [each.grad for each in (x, weight) if each.grad is not None]


@pytest.mark.parametrize("is_outside", [True, False], ids=["spool outside", "spool inside"])
@pytest.mark.parametrize("step", STEPS)
def test_gradients_are_those_of_torch_alone(spool: Spool, step: Step, is_outside: bool) -> None:
    expected = gradients(step, None, is_outside)
    for is_late in (False, True):
        found = gradients(step, spool, is_outside, is_late)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


def test_a_spool_inside_takes_tensors_and_one_outside_does_not(tmp_path: Path) -> None:
    for is_outside in (True, False):
        with open_spool(tmp_path, min_bytes=64) as spool:
            gradients(input_saved, spool, is_outside, is_late=True)
            assert (spool.report().written_bytes > 0) is not is_outside


def test_changes_after_the_spools_context_and_through_parts(spool: Spool) -> None:
    x = leaf()
    with allow_mutation_on_saved_tensors():
        with spool:
            made = x * 3
            loss = made.pow(2).sum()
        with torch.no_grad():
            made[30:].mul_(5)  # torch alone does not see this one (2.14)
        loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad((x * 3).pow(2).sum(), x)[0])


def test_what_torch_does_not_see_of_what_stays_raises(tmp_path: Path) -> None:
    x, factor = leaf(), torch.ones(60, 100, dtype=torch.float64)
    with open_spool(tmp_path, keep=[factor]) as spool, allow_mutation_on_saved_tensors():
        with spool:
            loss = (x * factor).sum()
        factor[30:].mul_(5)
        with pytest.raises(SavedTensorChangedError):
            loss.backward()


def test_what_several_operations_save_is_copied_once(tmp_path: Path) -> None:
    x = leaf()
    with open_spool(tmp_path, 1 << 30) as spool, allow_mutation_on_saved_tensors(), spool:
        made = x * 3
        loss = made.sin().sum() + made.exp().sum() + made.T.pow(2).sum()
        assert spool.report().unique_bytes == 2 * made.nbytes  # `made` and the result of `exp`
        loss.backward()


def test_wrapped_modules_inside(spool: Spool) -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 5)).double()
    x = leaf().detach()

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        with allow_mutation_on_saved_tensors():
            loss = model(x.clone()).square().sum()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(1)
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 64).round() / 64)  # so that adding and subtracting is exact
    expected = step()
    with spool.wrap(list(model)):
        assert all(map(torch.equal, step(), expected))
    assert spool.report().saved_bytes > 0


def test_other_hooks_between_are_watched(tmp_path: Path) -> None:
    x = leaf()
    with open_spool(tmp_path) as spool, allow_mutation_on_saved_tensors():
        with save_on_cpu(), spool:
            made = x * 3
            loss = made.pow(2).sum()
        with torch.no_grad():
            made.mul_(5)
        with pytest.raises(SavedTensorChangedError):
            loss.backward()
