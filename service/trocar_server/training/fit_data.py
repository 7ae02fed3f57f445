"""What a fit needs of its data sets and of its trainer, and no more."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from trocar_server.surgery import PassGuard
from trocar_server.training.augmentations import Augmentation
from trocar_server.training.batch import Batch
from trocar_server.training.spec import TrainerSpec
from trocar_server.training.step_result import EvalResult, StepResult


class Reader(Protocol):
    """Samples of a data set by their place, from 0."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, as augmentations see it."""
        ...

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def batch(self, indices: Tensor, augmentation: Augmentation | None = None, epoch: int = 0) -> Batch:
        """Return samples as the model takes them, on its device.

        Each input goes through the augmentation first; its random numbers depend on nothing but the trainer's
        seed, the epoch and the sample or the batch.
        """
        ...

    def announce(self, indices: Tensor) -> None:
        """Say which batch will be asked for next, so that it may be loaded meanwhile."""

    def labels(self, target: str) -> Collection[int] | None:
        """Return the different values of a target by name; None where it is not made of whole numbers."""
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


def named_target(targets: Mapping[str, Any], name: str) -> Tensor | None:
    """Return a target by name; without a name the only one there is."""
    if name in targets:
        value: Tensor = targets[name]
        return value
    return next(iter(targets.values())) if not name and len(targets) == 1 else None
