"""Small models that do not give the same answer to the same question, each in its own way."""

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Draws(nn.Module):
    """Adds torch's random numbers to a part that its own output does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Identity()
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        self.side(x + torch.rand_like(x))
        return self.last(x)


class DropsAlways(nn.Module):
    """Uses dropout whatever its mode."""

    def forward(self, x: torch.Tensor) -> Any:
        return F.dropout(x, 0.5, training=True)


class DropsInTraining(nn.Module):
    """Uses dropout as one should: in eval mode it does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.drop(x))


class DrawsFromNumpy(nn.Module):
    """Takes its random numbers from NumPy."""

    def forward(self, x: torch.Tensor) -> Any:
        return x + float(np.random.random())


class DrawsFromPython(nn.Module):
    """Takes its random numbers from Python."""

    def forward(self, x: torch.Tensor) -> Any:
        return x + random.random()


class DrawsFromItsOwn(nn.Module):
    """Has a generator of its own, which nobody else sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.seed += 1
        return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(self.seed))


class CountsCalls(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        assert isinstance(self.count, torch.Tensor)
        self.count += 1
        return x * self.count


class DrawsOnLargeInputs(nn.Module):
    """Draws random numbers for inputs that its example input is none of."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(x + torch.rand_like(x) if x.sum().item() > 100 else x)
