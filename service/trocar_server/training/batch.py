"""One batch of a step: what the model takes, and what its output is compared with."""

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
        args: Positional arguments of the forward.
        kwargs: Keyword arguments.
        targets: By name; a single one without a name is called "".
        size: Number of samples.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    size: int = 0

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device; itself where it is there already."""
        if all(tensor.device == device for tensor in _tensors((self.args, self.kwargs, self.targets))):
            return self
        return replace(
            self,
            args=_moved(self.args, device),
            kwargs=_moved(self.kwargs, device),
            targets=_moved(dict(self.targets), device),
        )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(item, device) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    return value
