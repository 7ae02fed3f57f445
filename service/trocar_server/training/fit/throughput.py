"""Throughput and memory use of a fit."""

import os
import resource
from pathlib import Path

import torch
from torch import nn

_MEMORY = 0.9
"""Weight of the past in the moving average of each unit."""


class Throughput:
    """Moving averages of the seconds per sample."""

    def __init__(self) -> None:
        self._training: float | None = None
        self._evaluation: float | None = None

    def trained(self, count: int, seconds: float) -> None:
        """Record a training batch."""
        self._training = _moved(self._training, seconds / max(count, 1))

    def evaluated(self, count: int, seconds: float) -> None:
        """Record an evaluation batch."""
        self._evaluation = _moved(self._evaluation, seconds / max(count, 1))

    @property
    def samples_per_s(self) -> float | None:
        """Training samples per second."""
        return 1 / self._training if self._training else None

    def seconds_for(self, training: int, evaluation: int) -> float | None:
        """Estimate seconds for sample counts; without a past evaluation, training speed is used for both."""
        if self._training is None:
            return None
        each = self._training if self._evaluation is None else self._evaluation
        return training * self._training + evaluation * each


def memory_bytes(module: nn.Module) -> int:
    """Return the memory in use: of the device's allocator on a GPU, else of the process."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _moved(before: float | None, now: float) -> float:
    return now if before is None else _MEMORY * before + (1 - _MEMORY) * now
