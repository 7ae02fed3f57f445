"""Models that a test can hold up in the middle of a pass, without anybody sleeping."""

import threading
from typing import Any

import torch
from torch import nn

WAIT_S = 60.0
"""How long a test waits for an event before it fails. Nothing waits this long when all is well."""


class Gate:
    """What test and model tell each other, from thread to thread."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Close nothing: passes run through."""
        self.holds = False
        self.entered = threading.Event()
        self.released = threading.Event()
        self.left = threading.Event()
        self.pass_count = 0
        self.was_aborted = False

    def hold(self) -> None:
        """Stop the next pass inside the model until `release`, or until its guard stops it."""
        self.holds = True

    def release(self) -> None:
        """Let the pass go on, and later ones through."""
        self.holds = False
        self.released.set()


GATE = Gate()
"""Of this process; the server of a test runs in it, too."""


class Gated(nn.Module):
    """Calls `step` for as long as the gate is held, so that the guard can stop it there."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Identity()
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(x if x.is_meta else self._held(x))

    def _held(self, x: torch.Tensor) -> torch.Tensor:
        GATE.pass_count += 1
        if not GATE.holds:
            return x
        GATE.entered.set()
        try:
            while not GATE.released.is_set():
                self.step(x)
        except BaseException:
            GATE.was_aborted = True
            raise
        finally:
            GATE.left.set()
        return x


class GatedOnData(Gated):
    """The same, but it cannot run without data."""

    def forward(self, x: torch.Tensor) -> Any:
        x.sum().item()
        return super().forward(x)


class StuckInOneModule(nn.Module):
    """Waits inside a single module, where no guard can look."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        if not x.is_meta:
            GATE.pass_count += 1
            if GATE.holds:
                GATE.entered.set()
                GATE.released.wait(WAIT_S)
                GATE.left.set()
        return self.last(x)


class _Held(torch.autograd.Function):
    """The identity, whose backward waits at the gate."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the same values."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Wait where the gate is held."""
        (gradient,) = gradients
        if not gradient.is_meta and GATE.holds:
            GATE.entered.set()
            GATE.released.wait(WAIT_S)
        return gradient


class _Counted(torch.autograd.Function):
    """The identity, whose backward counts as a pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the same values."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Count."""
        (gradient,) = gradients
        if not gradient.is_meta:
            GATE.pass_count += 1
        return gradient


class _Applies(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function.apply(x)


class GatedBackward(nn.Module):
    """Its backward pass is held at `held`, and counted when it comes to `counted`, which is before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.counted = _Applies(_Counted)
        self.held = _Applies(_Held)
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.held(self.counted(self.first(x))))
