"""Models for tests of load: one tells in which order it was called, one finds no memory."""

import threading
from typing import Any

import torch
from torch import nn

from tests.support.models.gated_models import GATE, WAIT_S

ORDER: list[float] = []
"""The first value of each input that a `Marked` has seen, in order."""


class Marked(nn.Module):
    """Says which input it sees, and waits inside a single module while the gate is held."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        if not x.is_meta:
            ORDER.append(float(x.flatten()[0]))
            if GATE.holds:
                GATE.entered.set()
                GATE.released.wait(WAIT_S)
        return self.last(x)


class Wide(nn.Module):
    """Returns 256 KiB for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(x[:, :1].expand(-1, 1 << 16).contiguous())


class Memory:
    """How much of it there is."""

    failures = 0
    """Passes that will find none."""
    lock = threading.Lock()


class Hungry(nn.Module):
    """Finds no memory as often as `Memory` says, in the middle of the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        with Memory.lock:
            if Memory.failures and not x.is_meta:
                Memory.failures -= 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return self.last(x)
