"""What a fit needs of its data sets and of its trainer, and no more."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trocar_server.surgery import PassGuard
from trocar_server.training.batch import Batch
from trocar_server.training.order import batches
from trocar_server.training.spec import TrainerSpec
from trocar_server.training.step_result import EvalResult, StepResult

_CHUNK = 1024
_LARGEST_TABLE = 64 << 20


class Reader(Protocol):
    """Samples of a data set by their place, from 0."""

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def batch(self, indices: Tensor, augmentation: Callable[[Tensor], Tensor] | None = None) -> Batch:
        """Return samples as the model takes them; each input goes through the augmentation first."""
        ...

    def targets(self, indices: Tensor) -> Mapping[str, Tensor]:
        """Return the targets of samples, without touching their inputs."""
        ...


class Schedule(Protocol):
    """The part of `schedules.Schedule` that a fit moves."""

    def expect(self, total_steps: int | None = None, total_epochs: int | None = None) -> None:
        """Say how long the training is."""

    def after_epoch(self) -> None:
        """Count an epoch."""

    def after_evaluation(self, value: float) -> None:
        """Tell what an evaluation came to."""


class Core(Protocol):
    """The part of `core.TrainerCore` that a fit drives."""

    @property
    def spec(self) -> TrainerSpec:
        """What the trainer is made of."""
        ...

    @property
    def module(self) -> nn.Module:
        """The trainer's tree."""
        ...

    @property
    def evaluated(self) -> nn.Module:
        """The tree that `evaluate` runs, in eval mode; with averages in the place of weights, if any."""
        ...

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the trained parameters."""
        ...

    @property
    def schedule(self) -> Schedule:
        """Its learning rates over time."""
        ...

    @property
    def update_count(self) -> int:
        """Updates of the weights so far."""
        ...

    @property
    def accumulated_count(self) -> int:
        """Batches whose gradients wait for the update."""
        ...

    def step(self, batch: Batch, guard: PassGuard) -> StepResult:
        """Take a batch, or leave everything as it was."""
        ...

    def evaluate(self, batch: Batch, guard: PassGuard) -> EvalResult:
        """Return loss and output of a batch."""
        ...


class Targets:
    """Targets of a data set; all of them in memory where they are small, as labels are.

    Args:
        reader: Of the data set.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._table: dict[str, Tensor] | None = None
        if len(reader):
            first = reader.targets(torch.arange(1))
            if sum(value.nbytes for value in first.values()) * len(reader) <= _LARGEST_TABLE:
                parts = [reader.targets(part) for part in batches(torch.arange(len(reader)), _CHUNK)]
                self._table = {name: torch.cat([part[name] for part in parts]) for name in first}

    def of(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the targets of samples, in new memory."""
        if self._table is None:
            return dict(self._reader.targets(indices))
        return {name: values.index_select(0, indices) for name, values in self._table.items()}


def labels_of(targets: Targets, count: int, name: str) -> dict[int, int] | None:
    """Return how often each label occurs; None where the target is not made of whole numbers."""
    found: dict[int, int] = {}
    for part in batches(torch.arange(count), _CHUNK):
        values = named_target(targets.of(part), name)
        if values is None or values.is_floating_point() or values.is_complex():
            return None
        labels, counts = values.unique(return_counts=True)
        for label, times in zip(labels.tolist(), counts.tolist(), strict=True):
            found[int(label)] = found.get(int(label), 0) + times
    return found


def named_target(targets: Mapping[str, Any], name: str) -> Tensor | None:
    """Return a target by name; without a name the only one there is."""
    if name in targets:
        value: Tensor = targets[name]
        return value
    return next(iter(targets.values())) if not name and len(targets) == 1 else None
