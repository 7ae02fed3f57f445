"""Models that checkpoint parts of themselves, and the same models without."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

KINDS = {"reentrant": True, "not reentrant": False}
"""The ways of torch to checkpoint, with their `use_reentrant`."""


class Checkpointed(nn.Module):
    """Checkpoints the function that it calls through `part`, in one of torch's two ways.

    Attributes:
        use_reentrant: The way; None for no checkpointing.
    """

    use_reentrant: bool | None = None

    def part(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.use_reentrant is None:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=self.use_reentrant)


class Layers(Checkpointed):
    """One block of a module, with batch norm, dropout and an in-place ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.block = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 8)
        )
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.part(self.block, self.stem(x)).tanh())


class First(Layers):
    """Its first block takes the inputs of the model, which require no gradient."""

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.part(lambda value: self.block(self.stem(value)).tanh(), x))


class Nested(Layers):
    """A checkpointed part inside another one."""

    def forward(self, x: Tensor) -> Any:
        return self.part(self._outer, self.stem(x))

    def _outer(self, x: Tensor) -> Any:
        return self.fc(self.part(partial(self._inner, scale=0.5), x.tanh()))

    def _inner(self, x: Tensor, scale: float) -> Any:
        return self.block(x) * scale


class Repeated(Layers):
    """Its block is called three times: in one checkpointed part, in another one, and outside."""

    def forward(self, x: Tensor) -> Any:
        x = self.part(self.block, self.stem(x))
        x = self.part(lambda value: self.block(value.sigmoid()) + value, x)
        return self.fc(self.block(x).tanh())


class Averaging(Layers):
    """Its part depends on a buffer that the part replaces."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.part(self._inner, self.stem(x)))

    def _inner(self, x: Tensor) -> Any:
        x = self.block(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return torch.tanh(x - self.mean)


NETS = {kind.__name__: kind for kind in (Layers, First, Nested, Repeated, Averaging)}
