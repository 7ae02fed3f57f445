"""A model with a function of autograd of its own that calls modules again in the backward pass."""

from typing import Any

import torch
from torch import nn


class _Rerun(torch.autograd.Function):
    """Runs a module without a graph, and once more in the backward pass, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: nn.Module) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        output: torch.Tensor = block(x)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.block(x)
        output.backward(*gradients)
        return x.grad, None


class Rerunning(nn.Module):
    """Rows of 6 numbers to 3 scores; `is_rerun` tells whether its block runs again in the backward pass."""

    def __init__(self, *, is_rerun: bool = True) -> None:
        super().__init__()
        self.is_rerun = is_rerun
        self.first = nn.Linear(6, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.fc = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = _Rerun.apply(x, self.block) if self.is_rerun else self.block(x)
        scores: torch.Tensor = self.fc(x)
        return scores


class Plain(Rerunning):
    """The same, without a second run."""

    def __init__(self) -> None:
        super().__init__(is_rerun=False)
