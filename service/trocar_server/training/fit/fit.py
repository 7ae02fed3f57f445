"""Fit: epochs over a data set, one unit of work at a time.

    fit = Fit(core, train, evaluation, spec, scratch_dir, checkpoint=lambda state: store(core, state))
    while not fit.is_over:
        for event in fit.advance(PassGuard()):
            ...

# Note: [Units of a fit]
A unit is a training batch, an evaluation batch, a batch of the feature cache or a checkpoint. Between two
units others may use the trainer's thread; to pause, stop calling `advance`. A unit that fails changes
nothing, and the next call tries it again. A batch whose worker was lost is a unit without events, and runs
again.

# Note: [Resuming a fit]
`FitState` and the trainer's state, taken between two units, are the complete state. The order of samples and
the random numbers of augmentations are functions of seed, epoch and position; those of the model belong to
the trainer's state. So a fit resumed from a checkpoint computes the same weights, bit by bit, as one that was
never interrupted.
"""

import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from trocar_server.surgery import PassGuard
from trocar_server.training.datasets.order import batches, epoch_order, padded, padded_count
from trocar_server.training.fit.events import EventKind, FitEvent
from trocar_server.training.fit.fit_caches import FitCaches, Progress
from trocar_server.training.fit.fit_check import check_fit, epoch_batch_count
from trocar_server.training.fit.fit_data import Core, Reader
from trocar_server.training.fit.fit_evaluation import Evaluation, is_better, loss_weight
from trocar_server.training.fit.fit_state import HISTORY, FitState
from trocar_server.training.fit.ranks.data_parallel import DataParallel
from trocar_server.training.fit.throughput import Throughput, memory_bytes
from trocar_server.training.spec.fit_spec import FitSpec
from trocar_server.training.step.step_result import StepResult


class Fit:
    """A validated fit. See Note: [Units of a fit].

    Args:
        core: The trainer; only the fit steps it meanwhile.
        train: The training data.
        evaluation: The data to evaluate on after each epoch, or None.
        spec: The fit's spec.
        scratch_dir: Folder for features on disk.
        checkpoint: Makes the trainer's state and this state durable, and returns the checkpoint's number.
        state: State to resume from; the trainer's own state is loaded already.
        parallel: Steps the core on the spec's workers; needed if these are several. Closed with the fit.

    Raises:
        ServiceError: `FIT_INVALID`, with all problems.
    """

    def __init__(
        self,
        core: Core,
        train: Reader,
        evaluation: Reader | None,
        spec: FitSpec,
        scratch_dir: Path,
        checkpoint: Callable[[FitState], int],
        state: FitState | None = None,
        parallel: DataParallel | None = None,
    ) -> None:
        # A fit that is resumed waits for room: nodes may be on their way back.
        room_problem = parallel.room_problem() if parallel is not None and state is None else ""
        parts = check_fit(core, train, evaluation, spec, room_problem)
        self.spec = spec
        self._core, self._train, self._evaluation_data = core, train, evaluation
        self._augmentation, self._checkpoint = parts.augmentation, checkpoint
        self._parallel = parallel if spec.workers > 1 else None
        self._state = state or FitState()
        self._is_due = self._state.checkpoint_update < 0
        self.is_saved = True
        """Whether nothing has changed the trainer since the last checkpoint, or the one resumed from.

        Batches without an update do, and so do evaluations of a plateau.
        """
        self._is_told = False
        self._caches = FitCaches(core, train, evaluation, spec, parts.augmentation, scratch_dir)
        self._filling: Generator[Progress, PassGuard, None] | None = None
        self._is_filled = False
        self._evaluation = Evaluation(core, evaluation, spec.batch_size, parts.metrics, parts.target)
        self._order: tuple[int, list[Tensor]] = (-1, [])
        self._throughput = Throughput()
        if state is None:  # its first checkpoint has the length; from a later one the count may differ
            core.schedule.expect(total_steps=parts.update_count, total_epochs=spec.epochs)

    @property
    def is_over(self) -> bool:
        """Whether the fit has ended."""
        return self._is_told

    @property
    def step_total(self) -> int:
        """Training batches of all epochs, unless the fit ends early."""
        return self.spec.epochs * epoch_batch_count(len(self._train), self.spec)

    @property
    def cache_refusals(self) -> dict[str, str]:
        """Why features are not cached, by `training` and `evaluation`; known after the first step."""
        return dict(self._caches.why_not)

    def state(self) -> FitState:
        """Return the state of the fit."""
        return self._state

    def load_state(self, state: FitState) -> None:
        """Resume from a state; the trainer's own state is loaded already."""
        self._state = state
        self._is_due, self._is_told, self.is_saved = state.checkpoint_update < 0, False, True
        self._evaluation.reset()

    @property
    def needs_workers(self) -> bool:
        """Whether the next training batch waits for workers that are not there yet."""
        is_next = self._state.phase == "train" and self._is_filled and not (self._is_due or self._is_told)
        return self._parallel is not None and is_next and not self._parallel.is_ready

    def prepare(self, guard: PassGuard) -> None:
        """Start the workers, on any thread; without it the next batch starts them, and takes as long.

        Raises:
            ServiceError: As `DataParallel.prepare`.
            PassAborted: The guard stopped it.
        """
        if self._parallel is not None:
            self._parallel.prepare(guard)

    def advance(self, guard: PassGuard) -> list[FitEvent]:
        """Do one unit of work; return its events, none when the fit is over.

        Raises:
            ServiceError: The unit failed and changed nothing.
            PassAborted: The guard stopped the unit; it changed nothing.
        """
        if self._is_told:
            return []
        if self._is_due:
            return [self._save()]
        if self._state.phase == "finished":
            return [self._finish()]
        if not self._is_filled:
            return self._fill(guard)
        return self._evaluate(guard) if self._state.phase == "evaluate" else self._step(guard)

    def note(self, kind: EventKind, **facts: Any) -> FitEvent:
        """Return a numbered event with an external cause: `paused`, `cancelled`, `failed`."""
        return self._event(kind, **facts)

    def close(self) -> None:
        """Free resources beside the trainer."""
        self._caches.close()
        if self._parallel is not None:
            self._parallel.close()

    # --- Units -------------------------------------------------------------------------------------

    def _fill(self, guard: PassGuard) -> list[FitEvent]:
        try:
            if self._filling is None:
                self._filling = self._caches.fill()
                next(self._filling)
            progress = self._filling.send(guard)
        except StopIteration:
            self._is_filled = True
            return []
        except BaseException:
            self._filling = None  # a generator that raised is exhausted; the next call starts again
            self._caches.close()
            raise
        message = progress.message or None
        return [self._event("cache", done=progress.done, total=progress.total, message=message)]

    def _step(self, guard: PassGuard) -> list[FitEvent]:
        state, started = self._state, time.perf_counter()
        order = self._batches(state.epoch)
        indices = order[state.batch]
        following = order[state.batch + 1 : state.batch + 2]
        result = self._caches.train(indices, lambda batch: self._core.step(batch, guard))
        if result is None:
            batch = self._train.batch(indices, self._augmentation or None, state.epoch)
            for others in following:
                self._caches.announce_training(others)
            stepped = (self._parallel or self._core).step(batch, guard)
            if stepped is None:
                return []
            result = stepped
        self.is_saved = False
        self._throughput.trained(len(indices), time.perf_counter() - started)
        counted = 0 if result.is_skipped else len(indices)
        weight = loss_weight(self._core.spec.losses, counted, self.spec.workers)
        self._state = replace(
            state,
            batch=state.batch + 1,
            step=state.step + 1,
            update=state.update + result.is_update,
            loss_sum=state.loss_sum + (result.loss * weight if counted else 0.0),
            sample_sum=state.sample_sum + counted,
        )
        every = self.spec.checkpoint_every
        self._is_due = bool(every and result.is_update and self._state.update % every == 0)
        events = [self._step_event(result)]
        if self._state.batch == len(order):
            events.append(self._end_training(result))
        return events

    def _evaluate(self, guard: PassGuard) -> list[FitEvent]:
        started = time.perf_counter()
        count = self._evaluation.advance(self._caches, guard)
        self._throughput.evaluated(count, time.perf_counter() - started)
        if not self._evaluation.is_done:
            return []
        loss, metrics = self._evaluation.result()
        self._evaluation.reset()
        self._core.schedule.after_evaluation(loss)
        self.is_saved = self.is_saved and self._core.spec.schedule.name != "plateau"
        best = self._judge(loss, metrics)
        reported = {"loss": loss, "metrics": metrics}
        history = (*self._state.history[:-1], {**self._state.history[-1], "evaluation": reported})
        self._state = replace(self._state, history=history)
        total = len(self._evaluation_data or ())
        event = self._event("evaluation", loss=loss, metrics=metrics, is_best=best, sample_count=total)
        self._next_epoch()
        return [event]

    def _save(self) -> FitEvent:
        # The saved state counts the number of this event as used.
        kept = replace(self._state, event=self._state.event + 1, checkpoint_update=self._state.update)
        number = self._checkpoint(kept)
        event = self._event("checkpoint", checkpoint=number)
        self._state, self._is_due, self.is_saved = kept, False, True
        return event

    def _finish(self) -> FitEvent:
        self._is_told = True
        self.close()
        return self._event("finished", message=self._state.ended)

    # --- Between units -----------------------------------------------------------------------------

    def _batches(self, epoch: int) -> list[Tensor]:
        if self._order[0] != epoch:
            spec = self.spec
            order = epoch_order(len(self._train), self._core.spec.seed, epoch, shuffle=spec.shuffle)
            order = padded(order, spec.workers)
            self._order = (epoch, batches(order, spec.batch_size, drop_last=spec.drop_last))
        return self._order[1]

    def _end_training(self, last: StepResult) -> FitEvent:
        """End the training phase of an epoch."""
        state = self._state
        self._core.schedule.advance("epoch")
        loss = state.loss_sum / state.sample_sum if state.sample_sum else float("nan")
        entry = {
            "epoch": state.epoch,
            "step": state.step,
            "loss": loss,
            "learning_rates": [*last.learning_rates],
        }
        event = self._event("epoch", loss=loss, sample_count=state.sample_sum)
        history = (*state.history, entry)[-HISTORY:]
        self._state = replace(self._state, history=history, loss_sum=0.0, sample_sum=0, phase="evaluate")
        if self._evaluation_data is None:
            self._next_epoch()
        return event

    def _judge(self, loss: float, metrics: dict[str, Any]) -> bool | None:
        """Compare an evaluation with the best so far, for the early stop."""
        rule, state = self.spec.early_stop, self._state
        if rule is None:
            return None
        value = loss if rule.metric == "loss" else float(metrics[rule.metric])
        if is_better(value, state.best, rule):
            self._state = replace(state, best=value, bad_count=0)
            return True
        self._state = replace(state, bad_count=state.bad_count + 1)
        return False

    def _next_epoch(self) -> None:
        state, rule = self._state, self.spec.early_stop
        ended = "all epochs are done" if state.epoch + 1 == self.spec.epochs else ""
        if rule is not None and state.bad_count >= rule.patience:
            ended = f"{rule.metric} did not improve in {state.bad_count} evaluations"
        phase = "finished" if ended else "train"
        self._state = replace(state, epoch=state.epoch + (not ended), batch=0, phase=phase, ended=ended)  # type: ignore[arg-type]
        self._is_due = self._is_due or not self.spec.checkpoint_every or (bool(ended) and not self.is_saved)

    # --- Events ------------------------------------------------------------------------------------

    def _step_event(self, result: StepResult) -> FitEvent:
        return self._event(
            "step",
            update=self._state.update,
            loss=result.loss,
            terms=dict(result.terms) or None,
            learning_rates=tuple(result.learning_rates),
            gradient_norm=result.gradient_norm if result.is_update else None,
            changed={str(index): count for index, count in result.changed.items()} or None,
            is_skipped=result.is_skipped or None,
            sample_count=result.sample_count,
            samples_per_s=self._throughput.samples_per_s,
            seconds_left=self._throughput.seconds_for(*self._samples_left()),
            memory_bytes=memory_bytes(self._core.module),
            saved_bytes=result.saved_bytes or None,
            written_bytes=result.written_bytes or None,
        )

    def _samples_left(self) -> tuple[int, int]:
        """Return the remaining training and evaluation samples."""
        state, spec = self._state, self.spec
        count = epoch_batch_count(len(self._train), spec)
        of_epoch = min(count * spec.batch_size, padded_count(len(self._train), spec.workers))
        epochs_left = spec.epochs - state.epoch
        done = min(state.batch * spec.batch_size, of_epoch)
        return epochs_left * of_epoch - done, epochs_left * len(self._evaluation_data or ())

    def _event(self, kind: EventKind, **facts: Any) -> FitEvent:
        state = self._state
        self._state = replace(state, event=state.event + 1)
        return FitEvent(
            number=state.event, kind=kind, step=state.step, epoch=state.epoch, time=time.time(), **facts
        )
