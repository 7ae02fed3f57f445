"""All of a trainer that changes, as tensors and plain facts."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TrainerState:
    """What a trainer is at one moment."""

    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]
