"""Activation checkpointing inside, outside and beside a spool."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.unit.spool.steps import are_equal, open_spool


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.layer(x).tanh(), 0.3) * x.sigmoid()


def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(4))


def inputs() -> torch.Tensor:
    return torch.randn(30, 40, generator=torch.Generator().manual_seed(1)).requires_grad_()


Step = Callable[[nn.ModuleList, Any, bool], torch.Tensor]


def inside(layers: nn.ModuleList, context: Any, is_reentrant: bool) -> torch.Tensor:
    """The spool keeps what checkpointing keeps: the inputs of each block."""
    x = inputs()
    with context:
        y = x * 1
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=is_reentrant)
        return y.square().sum()


def outside(layers: nn.ModuleList, context: Any, is_reentrant: bool) -> torch.Tensor:
    """What a block computes again is spooled."""

    def spooled(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with context:
            result: torch.Tensor = layer(x)
            return result

    y = inputs() * 1
    for layer in layers:
        y = checkpoint(spooled, layer, y, use_reentrant=is_reentrant)
    return y.square().sum()


def every_second(layers: nn.ModuleList, context: Any, is_reentrant: bool) -> torch.Tensor:
    with context:
        y = inputs() * 1
        for index, layer in enumerate(layers):
            y = checkpoint(layer, y, use_reentrant=is_reentrant) if index % 2 else layer(y)
        return y.square().sum()


def nested(layers: nn.ModuleList, context: Any, is_reentrant: bool) -> torch.Tensor:
    def pair(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(layers[1], layers[0](x), use_reentrant=is_reentrant)
        return y

    with context:
        y = checkpoint(pair, inputs() * 1, use_reentrant=is_reentrant)
        y = checkpoint_sequential(layers[2:], 2, y, use_reentrant=is_reentrant)
        loss: torch.Tensor = y.square().sum()
        return loss


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad:UserWarning"
)  # of nested reentrant ones
@pytest.mark.parametrize("budget_bytes", [0, 10_000, 1 << 30])
@pytest.mark.parametrize("is_reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("is_backward_within", [False, True], ids=["backward behind", "backward within"])
@pytest.mark.parametrize("step", [inside, outside, every_second, nested])
def test_gradients_are_as_without_a_spool(
    tmp_path: Path, step: Step, is_reentrant: bool, is_backward_within: bool, budget_bytes: int
) -> None:
    found = []
    with open_spool(tmp_path, budget_bytes, min_bytes=100) as spool:
        for context in (nullcontext(), spool, spool):
            layers = blocks()
            torch.manual_seed(2)
            loss = step(layers, context, is_reentrant)
            with context if is_backward_within else nullcontext():
                loss.backward()
            found.append([p.grad for p in layers.parameters() if p.grad is not None])
            del loss
        assert len(found[0]) == 8
        assert are_equal(found[1], found[0])
        assert are_equal(found[2], found[0])
        assert spool.store.ledger.is_empty
        report = spool.report()
        assert report.unique_bytes > 0
        assert report.peak_bytes <= budget_bytes + 30 * 40 * 4
        assert (report.written_bytes > 0) == (budget_bytes < 1 << 30)


def test_checkpointing_inside_leaves_only_the_inputs_of_blocks(tmp_path: Path) -> None:
    with open_spool(tmp_path, min_bytes=100) as spool:
        loss = inside(blocks(), spool, False)
        # The input of each block is one, the last result another.
        assert spool.report().unique_bytes == 5 * 30 * 40 * 4
        loss.backward()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("is_reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_chosen_modules_inside_a_block_leave_its_gradients_alone(tmp_path: Path, is_reentrant: bool) -> None:
    found = []
    for is_spooled in (False, True):
        layers = blocks()
        chosen = [layers[0], *(layer.layer for layer in layers)]
        with open_spool(tmp_path / str(is_spooled), min_bytes=0, modules=chosen) as spool:
            torch.manual_seed(2)
            loss = inside(layers, spool if is_spooled else nullcontext(), is_reentrant)
            loss.backward()
        found.append([p.grad for p in layers.parameters() if p.grad is not None])
    assert len(found[0]) == 8
    assert are_equal(found[1], found[0])
