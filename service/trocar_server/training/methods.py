"""How a batch becomes gradients, or an update: the three ways of optimizers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from trocar_server.surgery import PassGuard
from trocar_server.training.batch import Batch
from trocar_server.training.in_backward import InBackwardOptimizer, NonFiniteError
from trocar_server.training.passes import Scores, TrainingPass
from trocar_server.training.undo import GradientAccumulator, WeightBackup, is_finite, total_norm
from trocar_server.training.updating import Updater


@dataclass(frozen=True)
class Taken:
    """What came of a batch.

    Attributes:
        scores: Its loss.
        changed: How many elements each gradient rule changed.
        norm: Of the gradients; None where they are freed as they come.
    """

    scores: Scores
    changed: Mapping[int, int] = field(default_factory=dict)
    norm: Tensor | None = None


class Method(Protocol):
    """A way to take a batch. When it raises, all is as before unless `is_torn`."""

    @property
    def updates(self) -> bool:
        """Whether weights are changed, too."""
        ...

    @property
    def is_torn(self) -> bool:
        """Whether the last batch failed with some weights changed and others not."""
        ...

    def begin(self) -> None:
        """Forget the last batch: it comes before `take`."""
        ...

    def take(self, batch: Batch, guard: PassGuard) -> Taken:
        """Take a batch.

        Raises:
            NonFiniteError: The loss or a gradient is not finite.
        """
        ...


@dataclass(frozen=True)
class Accumulating:
    """Adds the batch's share to the gradients; the weights are changed behind it."""

    passes: TrainingPass
    gradients: GradientAccumulator
    updates: bool = False
    is_torn: bool = False

    def begin(self) -> None:
        """Do nothing; see `Method`."""

    def take(self, batch: Batch, guard: PassGuard) -> Taken:
        """Take a batch; see `Method`."""
        with self.gradients.adding():
            scores, changed = self.passes.run(batch, guard)
            self.gradients.add()
            norm = finite_norm(self.gradients)
        return Taken(scores, changed, norm)


@dataclass(frozen=True)
class WithClosure:
    """LBFGS: it runs the batch as often as it likes, and changes the weights between."""

    passes: TrainingPass
    gradients: GradientAccumulator
    updater: Updater
    updates: bool = True
    is_torn: bool = False

    def begin(self) -> None:
        """Do nothing; see `Method`."""

    def take(self, batch: Batch, guard: PassGuard) -> Taken:
        """Take a batch; see `Method`."""
        first: list[Taken] = []
        changed: Counter[int] = Counter()

        def closure() -> float:
            self.gradients.clear()
            scores, counts = self.passes.run(batch, guard)
            norm = finite_norm(self.gradients)
            self.updater.clip(norm)
            changed.update(counts)
            first.append(Taken(scores, changed, norm))
            return scores.loss

        with WeightBackup(self.updater.optimizer).undoing():
            try:
                self.updater.update(closure)
            finally:
                self.gradients.clear()
        return first[0]


@dataclass(frozen=True)
class Updating:
    """Changes each weight within the backward pass."""

    passes: TrainingPass
    gradients: GradientAccumulator
    updater: Updater
    optimizer: InBackwardOptimizer
    updates: bool = True

    @property
    def is_torn(self) -> bool:
        """Whether the last batch failed with some weights changed and others not."""
        return self.optimizer.updated_count > 0

    def begin(self) -> None:
        """Forget the last batch."""
        self.optimizer.updated_count = 0

    def take(self, batch: Batch, guard: PassGuard) -> Taken:
        """Take a batch; see `Method`."""
        try:
            with self.optimizer.active():
                scores, changed = self.passes.run(batch, guard)
        finally:
            self.gradients.clear()
        self.updater.finish()
        return Taken(scores, changed)


def finite_norm(gradients: GradientAccumulator) -> Tensor:
    """Return the norm of all gradients.

    Raises:
        NonFiniteError: One of them is not finite.
    """
    present = gradients.present()
    norm = total_norm(present)
    if not is_finite(present, norm):
        raise NonFiniteError("a gradient")
    return norm
