"""Changes in place between forward and backward raise as torch does without hooks, wherever the bytes are."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.spool.steps import open_spool, wait_until_written
from trocar_server.spool import SavedTensorChangedError, Spool

Pair = tuple[torch.Tensor, torch.Tensor]
"""A result, and a tensor that its graph has saved."""


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, 600).reshape(20, 30).requires_grad_()


def input_of(x: torch.Tensor) -> Pair:
    made = x * 3
    return made.pow(3), made


def output_of(x: torch.Tensor) -> Pair:
    made = (x * 3).exp()
    return made * 1, made


def constant(x: torch.Tensor) -> Pair:
    factor = torch.ones(20, 30)
    return x * factor, factor


def part_of_a_large_one(x: torch.Tensor) -> Pair:
    large = torch.ones(20, 300)
    return x * large[:, :30], large


def small_part_of_a_large_one(x: torch.Tensor) -> Pair:
    large = torch.ones(20, 3000)
    return x[0] * large[0, :30], large


def parameter(x: torch.Tensor) -> Pair:
    weight = nn.Parameter(torch.ones(30, 30))
    return x @ weight, weight


def view_of_a_parameter(x: torch.Tensor) -> Pair:
    weight = nn.Parameter(torch.ones(30, 30))
    return x @ weight.T, weight


def tiny(x: torch.Tensor) -> Pair:
    factor = torch.ones(1)
    return x * factor, factor


def transposed(x: torch.Tensor) -> Pair:
    made = x * 3
    return made.T.pow(3), made


def detached(x: torch.Tensor) -> Pair:
    made = x * 3
    return made.pow(3), made.detach()


def conjugate(x: torch.Tensor) -> Pair:
    made = torch.complex(x, x) * 3
    return (made.conj() * made).real, made


MAKERS: list[Callable[[torch.Tensor], Pair]] = [
    input_of,
    output_of,
    constant,
    part_of_a_large_one,
    small_part_of_a_large_one,
    parameter,
    view_of_a_parameter,
    tiny,
    transposed,
    detached,
    conjugate,
]

CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda t: t.add_(1),
    "to the same": lambda t: t.copy_(t.clone()),
    "an element": lambda t: t.view(-1)[:1].zero_(),
}


def changed_result(
    maker: Callable[[torch.Tensor], Pair], change: Callable[[torch.Tensor], Any]
) -> torch.Tensor:
    result, saved = maker(leaf())
    with torch.no_grad():
        change(saved)
    return result.sum()


@pytest.mark.parametrize("budget_bytes", [0, 1 << 30], ids=["on disk", "in memory"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_change_raises(
    tmp_path: Path, maker: Callable[[torch.Tensor], Pair], change: str, budget_bytes: int
) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed_result(maker, CHANGES[change]).backward()
    with open_spool(tmp_path, budget_bytes, min_bytes=256) as spool:
        with spool:
            result, saved = maker(leaf())
        wait_until_written(spool)
        with torch.no_grad():
            CHANGES[change](saved)
        for _ in range(2):
            with pytest.raises(
                SavedTensorChangedError, match=r"modified by an inplace operation: .*version 1"
            ):
                result.sum().backward(retain_graph=True)
        del result, saved
        assert spool.store.ledger.is_empty


@pytest.mark.parametrize("budget_bytes", [0, 1 << 30], ids=["on disk", "in memory"])
def test_a_storage_saved_at_two_versions_is_two_blocks(tmp_path: Path, budget_bytes: int) -> None:
    with open_spool(tmp_path, budget_bytes, min_bytes=0) as spool:
        x = leaf()
        with spool:
            made = x * 3
            old = made.pow(3)
            made.add_(1)
            new, other = made.pow(3), made.T.exp() * made.detach().T
        with pytest.raises(SavedTensorChangedError):
            old.sum().backward()
        (found,) = torch.autograd.grad((new + other.T).sum(), x)
        made = x * 3 + 1
        (expected,) = torch.autograd.grad((made.pow(3) + made.exp() * made.detach()).sum(), x)
        assert torch.equal(found, expected)


def test_operations_in_place_within_forward_are_right(tmp_path: Path) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        made = x * 3
        made[:4] *= x[4:8].exp()
        made.add_(1).relu_()
        return (torch.nn.functional.elu_(made * 2) * x).sum()

    with open_spool(tmp_path, min_bytes=0) as spool:
        gradients = []
        for context in (nullcontext(), spool):
            x = leaf()
            with context:
                loss = forward(x)
            gradients.append(torch.autograd.grad(loss, x)[0])
        assert torch.equal(*gradients)


class ChangesWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - as torch calls it
        ctx: Any, grad: torch.Tensor
    ) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        found: torch.Tensor = grad * x.mul_(2)
        return found


@pytest.mark.parametrize("budget_bytes", [None, 0, 1 << 30], ids=["plain", "on disk", "in memory"])
def test_a_change_within_backward_raises_in_the_next(tmp_path: Path, budget_bytes: int | None) -> None:
    spool = Spool(tmp_path, budget_bytes or 0, min_bytes=0)
    x = leaf()
    with nullcontext() if budget_bytes is None else spool:
        loss = ChangesWhatItSaved.apply(x * 3).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, (x * 18).detach())
    spool.close()


def test_data_of_a_leaf_that_is_replaced_is_seen_as_without_a_spool(tmp_path: Path) -> None:
    gradients = []
    with open_spool(tmp_path, min_bytes=0) as spool:
        for context in (nullcontext(), spool):
            x, weight = leaf(), leaf()
            with context:
                loss = (x * weight).sum()
            weight.data = torch.full((20, 30), 5.0)
            gradients.append(torch.autograd.grad(loss, x)[0])
    assert torch.equal(gradients[0], torch.full((20, 30), 5.0))
    assert torch.equal(*gradients)
