"""Trainer core: weights, and transactional steps on them.

    core = TrainerCore(hosted, spec, teachers={}, scratch_dir=folder)
    result = core.step(Batch((images,), {}, {"": labels}, size=32), PassGuard())
    core.hosted   # the model with the current weights, to extract from

# Note: [Memory of a trainer]
A trainer has its own module tree. Frozen parameters share the base model's memory, trained parameters and all
buffers are copies. Weights are only changed in place, so views of their memory reflect every step.

# Note: [Transactional steps]
Weights, averages, optimizer and schedule change only after everything that can fail. Earlier changes are
rolled back: buffers, random state, gradients. For LBFGS, which evaluates repeatedly, everything is copied.
The in-backward optimizer cannot have copies: an error in the middle of its pass breaks the trainer.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.engine.host.recordings import record_example
from trocar_server.engine.schedule.lease import Replica
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import HostedModel, stages_for
from trocar_server.surgery import PassGuard, clear_caches, needs_autograd
from trocar_server.training.losses.batch import Batch
from trocar_server.training.model.description import TrainerDescription, describe
from trocar_server.training.model.determinism import determinism
from trocar_server.training.model.lora import adapter_config, peft_name, read_adapter
from trocar_server.training.model.tree import hosted_view, make_tree
from trocar_server.training.spec.trainer_spec import LoraSpec, TrainerSpec
from trocar_server.training.step.in_backward import InBackwardOptimizer, NonFiniteError
from trocar_server.training.step.rollback import (
    BufferBackup,
    GradientAccumulator,
    RandomStream,
    broken,
    closed,
    not_finite,
    step_errors,
)
from trocar_server.training.step.saved_tensors import SavedTensors
from trocar_server.training.step.state_conversion import StateParts, read_state, write_state
from trocar_server.training.step.step_result import EvalResult, StepResult
from trocar_server.training.step.trainer_state import TrainerState
from trocar_server.training.step.training_pass import Scores, TrainingPass
from trocar_server.training.step.update_rules import (
    Accumulating,
    SpreadPass,
    Updater,
    UpdateRule,
    Updating,
    WithClosure,
    finite_norm,
)
from trocar_server.training.step.written_weights import WrittenWeights

_Result = TypeVar("_Result")

_NOTHING_WRITTEN = nullcontext()
_COUNTS = ("step_count", "update_count", "skipped_count", "accumulated_count")


class TrainerCore:
    """Trains one model. Synchronous; one thread at a time, whose global state is left unchanged.

    Bit-equal on the CPU to the same schedule in plain torch. A failed call is rolled back completely;
    see Note: [Transactional steps].

    Args:
        base: The hosted base model; it is never changed.
        spec: The trainer's spec, validated by `spec_checks.check_spec`.
        teachers: The hosted models that the spec names, by id.
        scratch_dir: Parent of the spool's folder.

    Attributes:
        spec: As given.
        module: The trainer's module tree. See Note: [Memory of a trainer].
        head_path: Path of the replaced head; empty for none.
        trainable: Names of the trained parameters, in the order of `named_parameters`.
        hosted: The model over the trainer's memory, in eval mode; with moving averages in place of
            weights, if any. It follows the steps automatically.
        schedule: Learning rate schedule; the caller notifies it of epochs and evaluations.
        step_count: Batches processed, skipped ones included.
        update_count: Weight updates.
        skipped_count: Batches that were rolled back because of a non-finite value.
        accumulated_count: Batches accumulated for the next update.

    Raises:
        ServiceError: The spec does not fit the model.
    """

    def __init__(
        self, base: HostedModel, spec: TrainerSpec, teachers: Mapping[str, HostedModel], scratch_dir: Path
    ) -> None:
        self.spec = spec
        self.step_count = self.update_count = self.skipped_count = self.accumulated_count = 0
        self._broken = ""
        self._is_closed = False
        self.module, self.trainable, self.head_path, written = make_tree(
            base, spec, cache(lambda: record_example(base)[1])
        )
        parameters = dict(self.module.named_parameters())
        self._trained = {name: parameters[name] for name in self.trainable}
        stages = stages_for(base)
        self._updater = Updater(spec, self._trained, self.module, stages)
        self.schedule = self._updater.schedule
        averages = self._updater.averages
        self.hosted = hosted_view(base, self.module, spec, averages.tensors if averages else None, written)
        is_written = any(name in written for name, _ in self.module.named_parameters())
        self._written: WrittenWeights | None = None
        if is_written or not base.pristine.is_foreseen:
            self._written = WrittenWeights(self.module, written, self._trained, base.pristine)
        self._evaluating = Replica(self.hosted.pristine)
        self._buffers = BufferBackup(self.module)
        self._gradients = GradientAccumulator(list(self._trained.values()))
        self._norm: Tensor | None = None
        self._determinism = determinism(spec.deterministic)
        self._random = RandomStream(spec.seed, base.device)
        self._saved = SavedTensors(self.module, spec.saved_tensors, scratch_dir, stages)
        try:
            self._pass = TrainingPass(
                self.module, spec, self._trained, self.hosted, teachers, self._saved, self._buffers
            )
            self._update_rule = self._make_update_rule()
        except BaseException:
            self._saved.close()
            raise

    def step(self, batch: Batch, guard: PassGuard) -> StepResult:
        """Process a batch; update the weights if it completes an accumulation.

        Raises:
            ServiceError: `TARGET_REJECTED`, `INPUT_REJECTED`, `NON_FINITE_STEP`, `STORAGE_FULL`,
                `SPOOL_FAILED`, `OUT_OF_MEMORY`, `CANCELLED`, `DEADLINE_EXCEEDED`: rolled back.
                `TRAINER_BROKEN`: not rolled back, or broken before. `STEP_OUT_OF_ORDER`: an update is due.
        """
        taken = self._take(batch, guard)
        if taken.is_update or taken.is_skipped or self.accumulated_count < self.spec.accumulation:
            return taken
        _, compute_s = self._update()
        return replace(taken, is_update=True, compute_s=taken.compute_s + compute_s)

    def forward_backward(self, batch: Batch, guard: PassGuard) -> StepResult:
        """Process a batch and add its share to the gradients.

        Raises:
            ServiceError: See `step`; `INVALID_ARGUMENT`, the optimizer supports only full steps.
        """
        self._check_halves()
        return self._take(batch, guard)

    def optimizer_step(self) -> StepResult:
        """Update the weights by the accumulated gradients.

        Raises:
            ServiceError: `STEP_OUT_OF_ORDER`, batches of the accumulation are missing; `INVALID_ARGUMENT`,
                the optimizer supports only full steps; `TRAINER_BROKEN`.
        """
        self.check_usable()
        self._check_halves()
        if self.accumulated_count < self.spec.accumulation:
            raise ServiceError(
                ErrorReason.STEP_OUT_OF_ORDER,
                f"{self.accumulated_count} of {self.spec.accumulation} batches were processed; send the rest",
            )
        rates = self._updater.learning_rates
        norm, compute_s = self._update()
        return StepResult(
            loss=float("nan"),
            learning_rates=rates,
            gradient_norm=float(norm),
            is_update=True,
            compute_s=compute_s,
        )

    def evaluate(self, batch: Batch, guard: PassGuard) -> EvalResult:
        """Return loss and output of a batch in eval mode, with the moving averages, if any.

        Raises:
            ServiceError: `TARGET_REJECTED`, `INPUT_REJECTED`, `OUT_OF_MEMORY`, `CANCELLED` and others.
        """
        self.check_usable()
        started, here = time.perf_counter(), batch.to(self.hosted.device)
        with (
            step_errors(self.hosted),
            self._determinism(),
            self._random.in_place(is_kept=False),
        ):
            guard.check()
            scores, output = self._evaluating.run(lambda module: self._pass.evaluate(module, here, guard))
        return EvalResult(scores.loss, scores.terms, output, batch.size, time.perf_counter() - started)

    def class_dim(self, rank: int) -> int:
        """Return the dimension of the classes of the main output, of this rank."""
        return self._pass.class_dim(rank)

    def gradients(self) -> dict[str, Tensor]:
        """Return the accumulated gradients by parameter; parameters without one are left out."""
        return {name: p.grad.detach() for name, p in self._trained.items() if p.grad is not None}

    @contextmanager
    def spreading(self, spread: SpreadPass) -> Iterator[None]:
        """Let `spread` run the batches of the context's steps on several ranks; of these, this is rank 0.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, the optimizer updates weights during the backward pass.
        """
        self._check_halves()
        assert isinstance(self._update_rule, Accumulating)
        self._update_rule.spread = spread
        try:
            yield
        finally:
            self._update_rule.spread = None

    def run_shard(self, batch: Batch, guard: PassGuard, seed: int) -> tuple[Scores, Mapping[int, int]]:
        """Run a shard of another rank's batch forward and backward; its gradients are left in place.

        Args:
            batch: The shard.
            guard: Its guard.
            seed: Seed of the model's random numbers.

        Returns:
            As `TrainingPass.run`.

        Raises:
            NonFiniteError: The loss is not finite.
            ServiceError: As `step`.
        """

        def run(here: Batch, guard: PassGuard) -> tuple[Scores, Mapping[int, int]]:
            self._gradients.clear()
            return self._pass.run(here, guard)

        self._random = RandomStream(seed, self.hosted.device)
        return self._attempt(run, batch, guard)

    def shared_tensors(self) -> list[Tensor]:
        """Return the memory of what a pass reads and training changes: trained parameters and all buffers."""
        return [*self._trained.values(), *self.module.buffers()]

    def filled_gradients(self) -> list[Tensor]:
        """Return the gradient of each trained parameter; a missing one is set to zeros."""
        for parameter in self._trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return list(self.gradients().values())

    def drop_gradients(self, kept: Collection[str]) -> None:
        """Remove the gradients of all parameters but those named."""
        for name, parameter in self._trained.items():
            if name not in kept:
                parameter.grad = None

    def describe(self) -> TrainerDescription:
        """Count parameters and bytes of the trainer."""
        averages = self._updater.averages
        tensors = [*averages.tensors.values(), *averages.masters.values()] if averages else ()
        return describe(self.module, self._trained, tensors, self._updater.optimizer.state.values())

    @property
    def evaluated(self) -> nn.Module:
        """The tree that `evaluate` runs, over the same memory as `hosted`."""
        return self._evaluating.module

    @property
    def writes_itself(self) -> bool:
        """Whether passes write to the model's own tensors or keep state in it."""
        return self.hosted.pristine.is_renewed

    @property
    def is_broken(self) -> bool:
        """Whether it must be restored before further use."""
        return self._is_closed or bool(self._broken)

    def check_usable(self) -> None:
        """Refuse to show or use weights that are half updated.

        Raises:
            ServiceError: `TRAINER_BROKEN`; `UNKNOWN_TRAINER`, it was closed.
        """
        if self._is_closed:
            raise closed()
        if self._broken:
            raise broken(self._broken)

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Learning rates of the parameter groups, for the next update."""
        return tuple(self._updater.learning_rates)

    def state(self) -> TrainerState:
        """Return the complete state of the trainer, as copies in host memory.

        Raises:
            ServiceError: `TRAINER_BROKEN`.
        """
        self.check_usable()
        return write_state(self._parts(), {name: getattr(self, name) for name in _COUNTS})

    def load_state(self, state: TrainerState) -> None:
        """Restore a state of a trainer with the same spec; this also repairs a broken trainer.

        Raises:
            ServiceError: `CHECKPOINT_CORRUPT`, the state does not fit; nothing is changed.
        """
        for name, count in read_state(self._parts(), state, _COUNTS).items():
            setattr(self, name, count)
        self._norm, self._broken = None, ""

    def adapter(self) -> tuple[dict[str, Tensor], str]:
        """Return the weights of the adapter and of a new head under PEFT's names, and PEFT's configuration.

        Raises:
            ServiceError: `TRAINER_INVALID`, there is no adapter; `TRAINER_BROKEN`.
        """
        self.check_usable()
        spec = self._lora()
        shown = dict(self.hosted.module.named_parameters())
        tensors = {peft_name(name): shown[name].detach() for name in self.trainable}
        return tensors, adapter_config(self.module, spec, self.spec.model_id, self.head_path)

    def load_adapter(self, data: bytes) -> None:
        """Replace the weights of the adapter and of a new head by a PEFT file's.

        Raises:
            ServiceError: `TRAINER_INVALID`, there is no adapter, or it does not fit; nothing is changed.
                `TRAINER_BROKEN`.
        """
        self.check_usable()
        self._lora()
        outcome = read_adapter(data, self._trained)
        averages = self._updater.averages
        with torch.no_grad():
            for name, tensor in outcome.items():
                self._trained[name].copy_(tensor)
                if averages is not None:
                    averages.masters[name].copy_(tensor)
            if averages is not None:
                averages.round()

    def _lora(self) -> LoraSpec:
        if self.spec.lora is None:
            raise ServiceError(ErrorReason.TRAINER_INVALID, "the trainer has no adapter; create it with one")
        return self.spec.lora

    def close(self) -> None:
        """Release the trainer's resources beside its memory; no more steps follow."""
        self._saved.close()
        self._gradients.clear()
        self._is_closed = True

    def _update(self) -> tuple[Tensor, float]:
        """Update the weights; return the gradients' norm and the seconds that it took."""
        started = time.perf_counter()
        norm = finite_norm(self._gradients) if self._norm is None else self._norm
        try:
            with self._determinism():
                if self._updater.clip_norm is not None:
                    self._updater.clip(norm)
                self._updater.update()
        except BaseException as error:
            self._broken = f"the optimizer failed ({first_line(error)})"
            raise broken(self._broken) from error
        self._gradients.clear()
        self._norm, self.accumulated_count = None, 0
        self.update_count += 1
        return norm, time.perf_counter() - started

    def _make_update_rule(self) -> UpdateRule:
        updater, gradients = self._updater, self._gradients
        if self.spec.optimizer.name == "lbfgs":
            return WithClosure(self._pass, gradients, updater)
        if self.spec.optimizer.in_backward:
            names = self._parts().names()
            optimizer = InBackwardOptimizer(updater.optimizer, lambda parameter: names[id(parameter)])
            return Updating(self._pass, gradients, updater, optimizer)
        return Accumulating(self._pass, gradients)

    def _take(self, batch: Batch, guard: PassGuard) -> StepResult:
        """Process a batch by the optimizer's update rule."""
        if self._is_closed or self._broken:
            self.check_usable()
        if not self.schedule.is_made:
            self.schedule.check_ready()
        if self.accumulated_count >= self.spec.accumulation:
            raise ServiceError(
                ErrorReason.STEP_OUT_OF_ORDER,
                f"gradients of {self.accumulated_count} batches are accumulated and not applied; finish "
                "the update first",
            )
        started, rates = time.perf_counter(), self._updater.learning_rates
        saved, written = self._saved.counts() if self._saved.is_used else (0, 0)
        try:
            taken = self._attempt(self._update_rule.take, batch, guard)
        except NonFiniteError as error:
            return self._skipped(str(error), StepResult(float("nan"), learning_rates=rates), batch)
        self._norm = taken.norm
        self.step_count += 1
        self.update_count += self._update_rule.updates
        self.accumulated_count += not self._update_rule.updates
        now_saved, now_written = self._saved.counts() if self._saved.is_used else (0, 0)
        STEPS.add(batch.size, time.perf_counter() - started)
        return StepResult(
            loss=taken.scores.loss,
            terms=taken.scores.terms,
            learning_rates=rates,
            gradient_norm=float("nan") if taken.norm is None else float(taken.norm),
            changed=taken.changed,
            is_update=self._update_rule.updates,
            sample_count=batch.size,
            compute_s=time.perf_counter() - started,
            saved_bytes=now_saved - saved,
            written_bytes=now_written - written,
        )

    def _attempt(
        self,
        run: Callable[[Batch, PassGuard], _Result],
        batch: Batch,
        guard: PassGuard,
        *,
        is_last: bool = False,
    ) -> _Result:
        """Run a batch, and roll back if that fails. See Note: [Transactional steps].

        Where a function cache has kept tensors of another call's pass, it is cleared, and the batch runs once
        more, if it can. See Note: [Inference mode] in `surgery.kept_tensors`.
        """
        self._buffers.save()
        self._update_rule.begin()
        try:
            undoing = _NOTHING_WRITTEN if self._written is None else self._written.put_back()
            with step_errors(self.hosted), self._determinism(), self._random.in_place(), undoing:
                guard.check()
                return run(batch.to(self.hosted.device), guard)
        except BaseException as error:
            self._buffers.restore()
            if self._update_rule.is_torn:
                self._broken = f"a step failed while it updated weights ({first_line(error)})"
                raise broken(self._broken) from error
            if not (isinstance(error, ServiceError) and needs_autograd(error)):
                raise
            clear_caches(self.module)
            if is_last or not self._can_repeat(batch):
                raise
        return self._attempt(run, batch, guard, is_last=True)  # the handler keeps the failed pass alive

    def _can_repeat(self, batch: Batch) -> bool:
        """Whether no other rank takes part, and the failed pass has not written to the batch itself."""
        if isinstance(self._update_rule, Accumulating) and self._update_rule.spread is not None:
            return False
        inputs = (*batch.args, *batch.kwargs.values())
        return all(isinstance(value, Tensor) and value._version == 0 for value in inputs)

    def _skipped(self, what: str, result: StepResult, batch: Batch) -> StepResult:
        if self.spec.on_nonfinite == "fail":
            raise not_finite(what)
        self.step_count += 1
        self.skipped_count += 1
        return replace(result, is_skipped=True, sample_count=batch.size)

    def _parts(self) -> StateParts:
        return StateParts(self.module, self._trained, self._updater, self._random)

    def _check_halves(self) -> None:
        if self._update_rule.updates:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                "this trainer's optimizer updates weights during the backward pass; use `step`",
            )


@dataclass
class StepTotals:
    """Monotonic counters of a process for monitoring: batches of fits and calls, without skipped ones.

    Attributes:
        step_count: Batches processed.
        row_count: Their samples.
        compute_s: Seconds of computing them.
    """

    step_count: int = 0
    row_count: int = 0
    compute_s: float = 0.0

    def add(self, row_count: int, compute_s: float) -> None:
        """Count a batch."""
        self.step_count += 1
        self.row_count += row_count
        self.compute_s += compute_s


STEPS = StepTotals()
"""Of this process, closed trainers included."""
