"""Batch of a training step: model inputs and targets."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs and targets.

        Batch((images,), {}, {"": labels}, size=32)

    Attributes:
        args: Positional arguments of the forward pass.
        kwargs: Keyword arguments.
        targets: Targets by name; a single unnamed target has the name "".
        size: Number of samples.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    size: int = 0

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device; itself if all of its values are tensors that are there."""
        for value in (*self.args, *self.kwargs.values(), *self.targets.values()):
            if not isinstance(value, Tensor) or value.device != device:
                break
        else:
            return self
        return replace(
            self,
            args=_moved(self.args, device),
            kwargs=_moved(self.kwargs, device),
            targets=_moved(dict(self.targets), device),
        )


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(item, device) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    return value
