"""A trainer: its weights, and steps that change them or leave no trace.

    core = TrainerCore(hosted, spec, teachers={}, scratch_dir=folder)
    result = core.step(Batch((images,), {}, {"": labels}, size=32), PassGuard())
    core.hosted   # the model with the current weights, to extract from

# Note: [What a trainer owns]
Its tree of modules is its own. Frozen parameters are the base model's memory, trained parameters and all
buffers are copies. Weights are changed in place only, so whoever looks at their memory sees every step.

# Note: [As if it never ran]
Weights, averages, optimizer and schedule change behind all that can fail. What changes earlier is put back:
buffers, random numbers, gradients. LBFGS, which goes back and forth, gets copies of all. An
optimizer in the backward pass cannot have them: a fault in the middle of it breaks the trainer.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.engine.recordings import record_example
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import HostedModel, make_replica, stages_for
from trocar_server.surgery import PassGuard
from trocar_server.training.batch import Batch
from trocar_server.training.description import TrainerDescription, describe
from trocar_server.training.determinism import deterministic
from trocar_server.training.hosted_view import hosted_view
from trocar_server.training.in_backward import InBackwardOptimizer, NonFiniteError
from trocar_server.training.methods import Accumulating, Method, Updating, WithClosure, finite_norm
from trocar_server.training.passes import TrainingPass
from trocar_server.training.random_state import RandomStream
from trocar_server.training.saved_tensors import SavedTensors
from trocar_server.training.spec import TrainerSpec
from trocar_server.training.state import TrainerState
from trocar_server.training.step_errors import broken, not_finite, step_errors
from trocar_server.training.step_result import EvalResult, StepResult
from trocar_server.training.stored import Parts, read_state, write_state
from trocar_server.training.totals import TOTALS
from trocar_server.training.tree import make_tree
from trocar_server.training.undo import BufferBackup, GradientAccumulator
from trocar_server.training.updating import Updater

_COUNTS = ("step_count", "update_count", "skipped_count", "accumulated_count")


class TrainerCore:
    """Trains one model. Synchronous; one thread at a time, on which nothing global is left behind.

    Bit-equal on the CPU to the same schedule in plain torch. A call that fails leaves everything as it was;
    see Note: [As if it never ran].

    Args:
        base: The hosted model that it begins with; it is never changed.
        spec: What is wanted; `checking.check_spec` has approved of it.
        teachers: The hosted models that the spec names, by id.
        scratch_dir: Where the spool may make its folder.

    Attributes:
        spec: As given.
        module: The trainer's tree. See Note: [What a trainer owns].
        head_path: Of the head that was replaced; empty for none.
        trainable: Names of the trained parameters, in the order of `named_parameters`.
        hosted: The model over the trainer's memory, in eval mode; with moving averages in the place of
            weights where there are any. It follows the steps by itself.
        evaluated: The tree that `evaluate` runs, over the same memory as `hosted`.
        schedule: Of the learning rates; to be told of epochs and evaluations.
        step_count: Batches that were taken, skipped ones included.
        update_count: Updates of the weights.
        skipped_count: Batches that left no trace because something was not finite.
        accumulated_count: Batches whose gradients wait for the update.

    Raises:
        ServiceError: The spec does not fit the model.
    """

    def __init__(
        self, base: HostedModel, spec: TrainerSpec, teachers: Mapping[str, HostedModel], scratch_dir: Path
    ) -> None:
        self.spec = spec
        self.step_count = self.update_count = self.skipped_count = self.accumulated_count = 0
        self._broken = ""
        self.module, self.trainable, self.head_path = make_tree(
            base, spec, cache(lambda: record_example(base)[1])
        )
        parameters = dict(self.module.named_parameters())
        self._trained = {name: parameters[name] for name in self.trainable}
        self._updater = Updater(spec, self._trained, self.module)
        self.schedule = self._updater.schedule
        averages = self._updater.averages
        self.hosted = hosted_view(base, self.module, spec, averages.tensors if averages else None)
        self.evaluated = make_replica(self.hosted.module)
        self._buffers = BufferBackup(self.module)
        self._gradients = GradientAccumulator(list(self._trained.values()))
        self._norm: Tensor | None = None
        self._random = RandomStream(spec.seed, base.device)
        self._saved = SavedTensors(self.module, spec.saved_tensors, scratch_dir, stages_for(base.spec))
        self._pass = TrainingPass(self.module, spec, self._trained, self.hosted, teachers, self._saved)
        self._method = self._make_method()

    def step(self, batch: Batch, guard: PassGuard) -> StepResult:
        """Take a batch; update the weights when it is the last of an accumulation.

        Raises:
            ServiceError: `TARGET_REJECTED`, `INPUT_REJECTED`, `NON_FINITE_STEP`, `STORAGE_FULL`,
                `SPOOL_FAILED`, `OUT_OF_MEMORY`, `CANCELLED`, `DEADLINE_EXCEEDED`: all is as before.
                `TRAINER_BROKEN`: it is not, or was not before. `STEP_OUT_OF_ORDER`: an update is due.
        """
        taken = self._take(batch, guard)
        if taken.is_update or taken.is_skipped or self.accumulated_count < self.spec.accumulation:
            return taken
        updated = self.optimizer_step()
        return replace(taken, is_update=True, compute_s=taken.compute_s + updated.compute_s)

    def forward_backward(self, batch: Batch, guard: PassGuard) -> StepResult:
        """Take a batch and add its share to the gradients.

        Raises:
            ServiceError: See `step`; `INVALID_ARGUMENT`, the optimizer can only do whole steps.
        """
        self._check_halves()
        return self._take(batch, guard)

    def optimizer_step(self) -> StepResult:
        """Update the weights by the gradients of the batches that were taken.

        Raises:
            ServiceError: `STEP_OUT_OF_ORDER`, batches of the accumulation are missing; `INVALID_ARGUMENT`,
                the optimizer can only do whole steps; `TRAINER_BROKEN`.
        """
        self._check_usable()
        self._check_halves()
        if self.accumulated_count < self.spec.accumulation:
            raise ServiceError(
                ErrorReason.STEP_OUT_OF_ORDER,
                f"{self.accumulated_count} of {self.spec.accumulation} batches were taken; take the rest",
            )
        started, rates = time.perf_counter(), self._updater.learning_rates
        norm = finite_norm(self._gradients) if self._norm is None else self._norm
        with self._breaking(), deterministic(self.spec.deterministic):
            self._updater.clip(norm)
            self._updater.update()
        self._gradients.clear()
        self._norm, self.accumulated_count = None, 0
        self.update_count += 1
        return StepResult(
            loss=float("nan"),
            learning_rates=rates,
            gradient_norm=float(norm),
            is_update=True,
            compute_s=time.perf_counter() - started,
        )

    def evaluate(self, batch: Batch, guard: PassGuard) -> EvalResult:
        """Return loss and output of a batch in eval mode, of the moving averages where there are any.

        Raises:
            ServiceError: `TARGET_REJECTED`, `INPUT_REJECTED`, `OUT_OF_MEMORY`, `CANCELLED` and others.
        """
        self._check_usable()
        started, here = time.perf_counter(), batch.to(self.hosted.device)
        with (
            step_errors(self.hosted),
            deterministic(self.spec.deterministic),
            self._random.in_place(is_kept=False),
        ):
            guard.check()
            scores, output = self._pass.evaluate(self.evaluated, here, guard)
        return EvalResult(scores.loss, scores.terms, output, batch.size, time.perf_counter() - started)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that wait for the update, by parameter, where there are any."""
        return {name: p.grad.detach() for name, p in self._trained.items() if p.grad is not None}

    def describe(self) -> TrainerDescription:
        """Count what the trainer is made of."""
        averages = self._updater.averages
        tensors = averages.tensors.values() if averages else ()
        return describe(self.module, self._trained, tensors, self._updater.optimizer.state.values())

    @property
    def is_broken(self) -> bool:
        """Whether it must be restored before it can do anything."""
        return bool(self._broken)

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Of each parameter group, for the next update."""
        return tuple(self._updater.learning_rates)

    def state(self) -> TrainerState:
        """Return copies of all that the trainer has to remember, on the host.

        Raises:
            ServiceError: `TRAINER_BROKEN`.
        """
        self._check_usable()
        return write_state(self._parts(), {name: getattr(self, name) for name in _COUNTS})

    def load_state(self, state: TrainerState) -> None:
        """Go on from a state of a trainer of the same spec; a broken trainer is whole again.

        Raises:
            ServiceError: `CHECKPOINT_CORRUPT`, the state does not fit; nothing is changed.
        """
        for name, count in read_state(self._parts(), state, _COUNTS).items():
            setattr(self, name, count)
        self._norm, self._broken = None, ""

    def close(self) -> None:
        """Free what the trainer holds beside its memory; it takes no more steps."""
        self._saved.close()
        self._gradients.clear()
        self._broken = "it is closed"

    def _make_method(self) -> Method:
        updater, gradients = self._updater, self._gradients
        if self.spec.optimizer.name == "lbfgs":
            return WithClosure(self._pass, gradients, updater)
        if self.spec.optimizer.in_backward:
            names = self._parts().names()
            optimizer = InBackwardOptimizer(updater.optimizer, lambda parameter: names[id(parameter)])
            return Updating(self._pass, gradients, updater, optimizer)
        return Accumulating(self._pass, gradients)

    def _take(self, batch: Batch, guard: PassGuard) -> StepResult:
        """Take a batch as the optimizer wants it."""
        self._check_usable()
        self.schedule.check_ready()
        if self.accumulated_count >= self.spec.accumulation:
            raise ServiceError(
                ErrorReason.STEP_OUT_OF_ORDER,
                f"gradients of {self.accumulated_count} batches wait for the optimizer's step; do it first",
            )
        started, rates = time.perf_counter(), self._updater.learning_rates
        saved, written = self._saved.counts()
        try:
            with self._attempt():
                guard.check()
                taken = self._method.take(batch.to(self.hosted.device), guard)
                self._buffers.settle()
        except NonFiniteError as error:
            return self._skipped(str(error), StepResult(float("nan"), learning_rates=rates), batch)
        self._norm = taken.norm
        self.step_count += 1
        self.update_count += self._method.updates
        self.accumulated_count += not self._method.updates
        now_saved, now_written = self._saved.counts()
        TOTALS.stepped(batch.size, time.perf_counter() - started)
        return StepResult(
            loss=taken.scores.loss,
            terms=taken.scores.terms,
            learning_rates=rates,
            gradient_norm=float("nan") if taken.norm is None else float(taken.norm),
            changed=taken.changed,
            is_update=self._method.updates,
            sample_count=batch.size,
            compute_s=time.perf_counter() - started,
            saved_bytes=now_saved - saved,
            written_bytes=now_written - written,
        )

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Let what runs inside leave no trace when it fails. See Note: [As if it never ran]."""
        self._buffers.save()
        self._method.begin()
        try:
            with step_errors(self.hosted), deterministic(self.spec.deterministic), self._random.in_place():
                yield
        except BaseException as error:
            self._buffers.restore()
            if self._method.is_torn:
                self._broken = f"a step stopped in the middle of its updates ({first_line(error)})"
                raise broken(self._broken) from error
            raise

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Say that the trainer is broken when the update of its weights fails half way."""
        try:
            yield
        except BaseException as error:
            self._broken = f"the optimizer failed ({first_line(error)})"
            raise broken(self._broken) from error

    def _skipped(self, what: str, result: StepResult, batch: Batch) -> StepResult:
        if self.spec.on_nonfinite == "fail":
            raise not_finite(what)
        self.step_count += 1
        self.skipped_count += 1
        return replace(result, is_skipped=True, sample_count=batch.size)

    def _parts(self) -> Parts:
        return Parts(self.module, self._trained, self._updater, self._random)

    def _check_halves(self) -> None:
        if self._method.updates:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                "this trainer's optimizer updates weights within the step; use `step`",
            )

    def _check_usable(self) -> None:
        if self._broken:
            raise broken(self._broken)
