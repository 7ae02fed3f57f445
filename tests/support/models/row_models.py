"""Models whose rows depend on each other: on earlier ones, later ones, one of them, all of them."""

from collections.abc import Callable

import torch
from torch import nn

WIDTH = 6

MIXES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "cumsum": lambda x: x.cumsum(0),
    "first": lambda x: x + x[:1],
    "last": lambda x: x + x[-1:],
    "flip": lambda x: x + x.flip(0),
    "roll": lambda x: x + x.roll(1, 0),
    "mean": lambda x: x - x.mean(0),
    "sort": lambda x: x.sort(0).values,
    "earlier": lambda x: torch.ones(len(x), len(x)).tril() @ x,
}
"""By name, what a model does with its rows."""


class Mixing(nn.Module):
    """Mixes its rows as `MIXES` says, then a linear layer."""

    def __init__(self, mix: str) -> None:
        super().__init__()
        self._mix = mix
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(MIXES[self._mix](x))
        return found


class OverRows(nn.Module):
    """An LSTM for which the rows are one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 8)
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(self.lstm(x)[0])
        return found
