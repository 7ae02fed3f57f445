"""One batch as a trainer takes it: the arguments of the model's forward, and what they should give."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of some samples."""

    args: tuple[Any, ...]
    """Positional arguments of the forward pass."""
    kwargs: dict[str, Any]
    """Its arguments by name."""
    targets: dict[str, Tensor]
    """Targets by name; a single one without a name has the name ""."""
    size: int
    """How many samples."""
