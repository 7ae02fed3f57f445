"""Interfaces of a fit to its data sets and its trainer."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from trocar_server.surgery import PassGuard
from trocar_server.training.fit.augmentations import Augmentation
from trocar_server.training.losses.batch import Batch
from trocar_server.training.spec.trainer_spec import TrainerSpec
from trocar_server.training.step.step_result import EvalResult, StepResult


class Reader(Protocol):
    """Samples of a data set by index, from 0."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, as augmentations receive it."""
        ...

    @property
    def categories(self) -> Sequence[str]:
        """Names of the classes by label; empty where the data set has none."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def batch(self, indices: Tensor, augmentation: Augmentation | None = None, epoch: int = 0) -> Batch:
        """Return samples as the model takes them, on its device.

        Each input goes through the augmentation first; its random numbers depend only on the trainer's seed,
        the epoch and the sample or the batch.
        """
        ...

    def announce(self, indices: Tensor) -> None:
        """Announce the next batch, so that it can be prefetched."""

    def labels(self, target: str) -> Collection[int] | None:
        """Return the distinct values of a target by name; None if it is not of integers."""
        ...


class FitSchedule(Protocol):
    """The part of `schedules.Schedule` that a fit drives."""

    def expect(self, total_steps: int | None = None, total_epochs: int | None = None) -> None:
        """Set the length of the training."""

    def advance(self, unit: Literal["step", "epoch"]) -> None:
        """Count an epoch."""

    def after_evaluation(self, value: float) -> None:
        """Pass on the result of an evaluation."""


class Core(Protocol):
    """The part of `core.TrainerCore` that a fit drives."""

    @property
    def spec(self) -> TrainerSpec:
        """The trainer's spec."""
        ...

    @property
    def module(self) -> nn.Module:
        """The trainer's module tree."""
        ...

    @property
    def writes_itself(self) -> bool:
        """Whether passes write to the model's own tensors or keep state in it."""
        ...

    def class_dim(self, rank: int) -> int:
        """Return the dimension of the classes of the main output, of this rank."""
        ...

    @property
    def evaluated(self) -> nn.Module:
        """The tree that `evaluate` runs, in eval mode; with moving averages in place of weights, if any."""
        ...

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the trained parameters."""
        ...

    @property
    def schedule(self) -> FitSchedule:
        """Its learning rates over time."""
        ...

    @property
    def update_count(self) -> int:
        """Weight updates so far."""
        ...

    @property
    def accumulated_count(self) -> int:
        """Batches accumulated for the next update."""
        ...

    def step(self, batch: Batch, guard: PassGuard) -> StepResult:
        """Process a batch; if it fails, nothing has changed."""
        ...

    def evaluate(self, batch: Batch, guard: PassGuard) -> EvalResult:
        """Return loss and output of a batch."""
        ...


def named_target(targets: Mapping[str, Any], name: str) -> Tensor | None:
    """Return a target by name; without a name the only target."""
    if name in targets:
        value: Tensor = targets[name]
        return value
    return next(iter(targets.values())) if not name and len(targets) == 1 else None
