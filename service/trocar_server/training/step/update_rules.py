"""Update rules: how a batch becomes gradients or an update, for three kinds of optimizers.

An update is by optimizer, schedule and moving averages, in torch's order.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor, nn

from trocar_server.surgery import PassGuard
from trocar_server.training.losses.batch import Batch
from trocar_server.training.model.trained_parameters import NO_STAGES
from trocar_server.training.optim.foreach import add_all, copy_all, scale_all
from trocar_server.training.optim.optimizers import make_optimizer
from trocar_server.training.optim.schedules import Schedule
from trocar_server.training.spec.trainer_spec import TrainerSpec
from trocar_server.training.step.in_backward import InBackwardOptimizer, NonFiniteError
from trocar_server.training.step.rollback import GradientAccumulator, WeightBackup
from trocar_server.training.step.training_pass import Scores, TrainingPass

HALF_DTYPES = (torch.float16, torch.bfloat16)


class MovingAverages:
    """One average for each trained parameter: `average.mul_(decay).add_(weight, alpha=1 - decay)`.

        averages = MovingAverages(trained, decay=0.999)
        averages.update()   # after each update of the weights

    They start as copies of the weights. Their memory never changes. Averages of weights in 16 bits are
    computed in float32: 0.001 of a difference would be rounded away.

    Args:
        parameters: Trained parameters by name.
        decay: Between 0 and 1.

    Attributes:
        tensors: The averages by name, in the dtypes of the weights.
        masters: The averages as they are computed; the same tensors, but for weights in 16 bits.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.tensors = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self.masters = {
            name: tensor.float() if tensor.dtype in HALF_DTYPES else tensor
            for name, tensor in self.tensors.items()
        }
        names = [name for name, tensor in self.tensors.items() if self.masters[name] is not tensor]
        self._rounded = [self.tensors[name] for name in names]
        self._to_round = [self.masters[name] for name in names]
        self._averages = list(self.masters.values())
        self._weights: list[Tensor] = [parameter.detach() for parameter in parameters.values()]
        self._decay = decay

    def update(self) -> None:
        """Move each average towards its weight."""
        scale_all(self._averages, self._decay)
        add_all(self._averages, self._weights, 1 - self._decay)
        self.round()

    def round(self) -> None:
        """Let `tensors` follow a change of `masters`."""
        copy_all(self._rounded, self._to_round)


class Updater:
    """Applies gradients.

    Args:
        spec: The trainer's spec.
        trained: Trained parameters by name.
        module: The trainer's module tree.
        stages: Selectors by stage name.

    Attributes:
        optimizer: torch's optimizer.
        schedule: Its learning rate schedule.
        averages: Moving averages of the weights; None without `ema_decay`.
        clip_norm: The largest norm of all gradients; None without one.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        trained: Mapping[str, nn.Parameter],
        module: nn.Module,
        stages: Mapping[str, str] = NO_STAGES,
    ) -> None:
        self.optimizer = make_optimizer(spec.optimizer, trained, module, stages)
        self.schedule = Schedule(spec.schedule, self.optimizer)
        self.averages = MovingAverages(trained, spec.ema_decay) if spec.ema_decay is not None else None
        self.clip_norm = spec.clip_norm
        self._parameters: Sequence[nn.Parameter] = list(trained.values())

    @property
    def learning_rates(self) -> list[float]:
        """Learning rates of the parameter groups, as the next update uses them."""
        return list(map(float, map(itemgetter("lr"), self.optimizer.param_groups)))

    def clip(self, norm: Tensor) -> None:
        """Scale all gradients together to at most `clip_norm`; `norm` is their current norm."""
        if self.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.clip_norm, norm)

    def update(self, closure: Callable[[], float] | None = None) -> None:
        """Update the weights by the present gradients, or by the closure's; then `finish`."""
        if closure is None:
            self.optimizer.step()
        else:
            self.optimizer.step(closure)
        self.finish()

    def finish(self) -> None:
        """Advance the schedule and the averages after a weight update."""
        self.schedule.advance("step")
        if self.averages is not None:
            self.averages.update()


@dataclass(frozen=True)
class Taken:
    """Result of a batch.

    Attributes:
        scores: Its loss.
        changed: How many elements each gradient edit changed.
        norm: Norm of the gradients; None if they are freed during the pass.
    """

    scores: Scores
    changed: Mapping[int, int] = field(default_factory=dict)
    norm: Tensor | None = None


class UpdateRule(Protocol):
    """An update rule. If it raises, the state is unchanged unless `is_torn`."""

    @property
    def updates(self) -> bool:
        """Whether it also updates the weights."""
        ...

    @property
    def is_torn(self) -> bool:
        """Whether the last batch failed with some weights changed and others not."""
        ...

    def begin(self) -> None:
        """Reset the state of the last batch; called before `take`."""
        ...

    def take(self, batch: Batch, guard: PassGuard) -> Taken:
        """Process a batch.

        Raises:
            NonFiniteError: The loss or a gradient is not finite.
        """
        ...


BatchPass = Callable[[Batch, PassGuard], tuple[Scores, Mapping[int, int]]]
"""Runs a batch forward and backward, as `TrainingPass.run`."""
SpreadPass = Callable[[BatchPass, Batch, PassGuard], tuple[Scores, Mapping[int, int]]]
"""Runs a batch on several ranks: its own shard by the given pass; leaves the averages as gradients."""


@dataclass
class Accumulating:
    """Adds the batch's share to the gradients; the weights are updated afterwards."""

    passes: TrainingPass
    gradients: GradientAccumulator
    spread: SpreadPass | None = None
    """Runs batches on several ranks; None for this process alone."""
    updates: bool = False
    is_torn: bool = False

    def begin(self) -> None:
        """Do nothing; see `UpdateRule`."""

    def take(self, batch: Batch, guard: PassGuard) -> Taken:
        """Take a batch; see `UpdateRule`."""
        with self.gradients.adding():
            if self.spread is None:
                scores, changed = self.passes.run(batch, guard)
            else:
                scores, changed = self.spread(self.passes.run, batch, guard)
            collected = self.passes.present() if self.passes.changes_sums else None
            self.gradients.add()
            if collected is not None:
                changed = {**changed, **self.passes.change_sums(collected)}
            norm = finite_norm(self.gradients)
        return Taken(scores, changed, norm)


@dataclass(frozen=True)
class WithClosure:
    """LBFGS: runs the batch any number of times, and updates the weights in between."""

    passes: TrainingPass
    gradients: GradientAccumulator
    updater: Updater
    updates: bool = True
    is_torn: bool = False

    def begin(self) -> None:
        """Do nothing; see `UpdateRule`."""

    def take(self, batch: Batch, guard: PassGuard) -> Taken:
        """Take a batch; see `UpdateRule`."""
        first: list[Taken] = []
        changed: Counter[int] = Counter()

        def closure() -> float:
            self.gradients.clear()
            scores, counts = self.passes.run(batch, guard)
            if self.passes.changes_sums:
                counts = {**counts, **self.passes.change_sums(self.passes.present())}
            norm = finite_norm(self.gradients)
            self.updater.clip(norm)
            changed.update(counts)
            first.append(Taken(scores, changed, norm))
            return scores.loss

        with WeightBackup(self.updater.optimizer).rolling_back():
            try:
                self.updater.update(closure)
            finally:
                self.gradients.clear()
        return first[0]


@dataclass(frozen=True)
class Updating:
    """Updates each weight within the backward pass."""

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
        """Reset the state of the last batch."""
        self.optimizer.updated_count = 0

    def take(self, batch: Batch, guard: PassGuard) -> Taken:
        """Take a batch; see `UpdateRule`."""
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
    norm = torch.nn.utils.get_total_norm(present)  # as `clip_grad_norm_` computes it
    if not torch.isfinite(norm) and not all(bool(torch.isfinite(one).all()) for one in present):
        raise NonFiniteError("a gradient")  # otherwise the norm is not finite as squares overflow
    return norm
