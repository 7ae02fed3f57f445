"""Recorded passes of small models."""

from collections.abc import Callable

import torch
from torch import nn

from trocar_server.surgery import Leaf, Recording, record_calls


def recorded(kind: Callable[[], nn.Module], *shapes: tuple[int, ...], is_symbolic: bool = True) -> Recording:
    """Record a pass of a new model on zeros of these shapes."""
    with torch.device("meta" if is_symbolic else "cpu"):
        model, inputs = kind().eval(), [torch.zeros(shape) for shape in shapes]
    return record_calls(model, inputs, is_symbolic=is_symbolic)


def outputs(recording: Recording, path: str, call: int = 0) -> list[Leaf]:
    """Return what one call returned."""
    return recording.modules[path].calls[call].outputs
