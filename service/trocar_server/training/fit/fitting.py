"""Fit manager: active fits as tasks, their events and controls. Belongs to one event loop.

# Note: [Fits outlive connections and restarts]
A fit is a task of the server, not of a call: clients may disconnect and watch again. Its spec is stored with
the trainer, its position in each of its checkpoints; the first is written before the fit counts as begun. So
a restarted server resumes from the newest checkpoint and repeats the work since then. Events logged before
are not logged twice, so that a reconnecting watcher neither misses an event nor sees one again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from enum import StrEnum, unique
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.processor import Processed
from trocar_server.engine.request.plan import Payload
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, current_flow, set_flow
from trocar_server.processing.inputs import ProcessorInput, TextOptions
from trocar_server.surgery import PassGuard
from trocar_server.tasks import begin, shielded
from trocar_server.training.datasets.library import DatasetLibrary
from trocar_server.training.datasets.order import split_order
from trocar_server.training.files.event_log import LAST_KINDS, EventLog, LoggedEvent, NewEvent
from trocar_server.training.files.event_logs import EventLogs
from trocar_server.training.fit.fit import Fit
from trocar_server.training.fit.fit_check import import_parts
from trocar_server.training.fit.fit_data import Reader
from trocar_server.training.fit.fit_run import REPEATED, FitRun, began, new_event
from trocar_server.training.fit.fit_samples import KEPT_BYTES, DatasetSamples, InputProcessing, SamplePart
from trocar_server.training.fit.fit_state import FitState
from trocar_server.training.fit.ranks.data_parallel import DataParallel
from trocar_server.training.fit.ranks.local_ranks import LocalLauncher
from trocar_server.training.fit.ranks.rank_launch import RankLauncher
from trocar_server.training.phases import (
    ENDING,
    FITS,
    Effect,
    FitPhase,
    FitSignal,
    FitsPhase,
    FitsSignal,
    Machine,
    TrainerPhase,
    TrainerSignal,
)
from trocar_server.training.spec.fit_spec import FitSpec
from trocar_server.training.spec.fit_validation import parse_fit_spec
from trocar_server.training.trainer import Trainer
from trocar_server.training.trainers import TrainerListener, Trainers

_STOP_WITHIN_S = 5.0
"""How long a stopping server waits for the current batch of a fit before it aborts it."""
_log = structlog.get_logger("trocar")


@unique
class Command(StrEnum):
    """A control command for a fit."""

    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"


class Fits:
    """The fits of a server's trainers.

    Args:
        trainers: The trainers.
        library: The data sets.
        folder: Folder of the event logs.
        scratch_dir: Folder for cached features.
        is_shared: See `EventLogs`.
        launcher: Starts the workers of fits; processes of this machine when None.
    """

    def __init__(
        self,
        trainers: Trainers,
        library: DatasetLibrary,
        folder: Path,
        scratch_dir: Path,
        *,
        is_shared: bool = False,
        launcher: RankLauncher | None = None,
    ) -> None:
        self._trainers, self._library = trainers, library
        self._launcher = launcher or LocalLauncher(scratch_dir)
        self._scratch_dir = scratch_dir
        self._tasks: set[asyncio.Task[None]] = set()  # `stop` waits for them
        self._runs: dict[str, FitRun] = {}
        self._logs = EventLogs(folder, is_shared=is_shared)
        self._starting = asyncio.Lock()
        self._machine = Machine(FITS, FitsPhase.OPEN)
        trainers.subscribe(TrainerListener(self.forget, self.let_go, self.resume_soon))

    async def start(self, principal: str, trainer_id: str, spec: FitSpec, request_id: str = "") -> int:
        """Begin a fit, and return the number of its first event.

        Raises:
            ServiceError: `FIT_INVALID` with every problem, `UNKNOWN_TRAINER`, `UNKNOWN_DATASET`,
                `TRAINER_BUSY`, `STORAGE_FULL`, `STORAGE_UNAVAILABLE`.
        """
        trainer = await self._trainers.find(principal, trainer_id)
        return await shielded(self._start(trainer, spec, request_id))

    async def watch(self, principal: str, trainer_id: str, number: int | None) -> AsyncIterator[LoggedEvent]:
        """Yield events until the fit ends, or the server stops.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`; `UNKNOWN_FIT`, the trainer has had no fit.
        """
        await self._trainers.find(principal, trainer_id)
        log = await self._logs.of(trainer_id)
        if number is None and not log.next_number:
            raise ServiceError(ErrorReason.UNKNOWN_FIT, "the trainer has no fit yet; start one")
        async for event in log.watch(log.newest_fit_number if number is None else number):
            yield event

    async def control(self, principal: str, trainer_id: str, command: Command) -> str:
        """Pause, resume or cancel a fit; return its new state.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`; `UNKNOWN_FIT`, no fit is active.
        """
        trainer = await self._trainers.find(principal, trainer_id)
        return await shielded(self._control(trainer, command))

    async def restore_all(self) -> None:
        """Resume the fits that were active when the server ended."""
        for trainer in self._trainers.all():
            await self.resume(trainer)
        stored = await self._trainers.stored_ids()
        if stored is not None:
            await self._logs.clean(stored)

    def resume_soon(self, trainer: Trainer) -> None:
        """Resume the fit of a trainer that is restored late, in a task; until then the trainer is busy.

        Its preparation takes seconds, and other trainers may wait to be taken over.
        """
        if _is_active(trainer):
            trainer.send(TrainerSignal.BEGIN_FIT)
            begin(self.resume(trainer), self._tasks)

    async def resume(self, trainer: Trainer) -> None:
        """Resume the fit of a restored trainer, if one was active; a failure ends it, with an event."""
        async with self._starting:
            if not _is_active(trainer) or self._is_stopped or trainer.is_closed:
                return
            described = trainer.stored_facts["fit"]
            try:
                await self._restore(trainer, described)
            except ServiceError as error:
                _log.warning("fit not resumed", trainer_id=trainer.trainer_id, why=error.message)
                with suppress(ServiceError):  # its log cannot be read now: the next start tries again
                    log = await self._logs.of(trainer.trainer_id)
                    facts = {"reason": error.reason, "message": error.message, "step": 0, "epoch": 0}
                    await log.add([NewEvent("failed", time.time(), facts)])
                    await self._set_over(trainer, int(described["first_number"]))
            finally:
                if trainer.trainer_id not in self._runs:
                    trainer.send(TrainerSignal.END_FIT)

    async def let_go(self, trainer_id: str) -> None:
        """Abort the fit of a trainer that another server has taken over, and leave its files alone."""
        async with self._starting:
            run = self._runs.get(trainer_id)
        if run is not None:
            await self._give_up(run)
        await self._logs.let_go(trainer_id)

    async def stop(self, *, is_saving: bool = True) -> None:
        """Stop every fit.

        Args:
            is_saving: Whether to finish the current batch and save a checkpoint of each fit, so that the next
                start resumes them. Otherwise they stop at once.
        """
        self._machine.send(FitsSignal.STOP)
        async with self._starting:  # one that is being begun
            runs = list(self._runs.values())
        await asyncio.gather(*(self._stop(run) if is_saving else self._give_up(run) for run in runs))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._logs.close()

    async def hold_all(self) -> None:
        """Save and hold every fit after its current batch, until `let_go_on` or the next start.

        Fits that begin meanwhile are held, too. Again, it saves those that could not be saved before.
        """
        self._machine.send(FitsSignal.HOLD)
        async with self._starting:  # one that is being begun
            runs = list(self._runs.values())
        effects = [run.send(FitSignal.HOLD) for run in runs]
        for run, effect in zip(runs, effects, strict=True):
            await run.rests.wait()
            is_active = self._runs.get(run.trainer.trainer_id) is run
            if is_active and effect is Effect.SAVE and not run.is_saved:
                try:
                    await run.save()
                    run.is_saved = True
                except ServiceError as error:
                    _log.warning("fit not saved", trainer_id=run.trainer.trainer_id, why=error.message)

    def let_go_on(self) -> None:
        """End `hold_all`; a fit that its user paused stays paused."""
        self._machine.send(FitsSignal.RELEASE)
        for run in self._runs.values():
            run.is_saved = False
            run.send(FitSignal.RELEASE)

    @property
    def _is_stopped(self) -> bool:
        return self._machine.phase is FitsPhase.STOPPED

    @property
    def running_ids(self) -> set[str]:
        """Return the ids of the trainers with an active fit."""
        return set(self._runs)

    @property
    def held_count(self) -> int:
        """Return the number of fits that wait for `let_go_on`, without those that their users paused."""
        return sum(run.phase is FitPhase.HELD for run in self._runs.values())

    async def forget(self, trainer_id: str) -> None:
        """Cancel the fit of a trainer that is being closed, and delete its events."""
        async with self._starting:
            run = self._runs.get(trainer_id)
        if run is not None and run.task is not None:
            run.task.cancel()
            await asyncio.gather(run.task, return_exceptions=True)
            await self._close(run)
        await self._logs.forget(trainer_id)

    # --- Calls --------------------------------------------------------------------------------------

    async def _start(self, trainer: Trainer, spec: FitSpec, request_id: str) -> int:
        async with self._starting, trainer.numbering.at_rest():
            described = trainer.stored_facts.get("fit")
            if described is not None and request_id and described["request_id"] == request_id:
                return int(described["first_number"])
            if self._is_stopped:
                raise _shutting_down()
            trainer.check_changeable()
            log = await self._logs.of(trainer.trainer_id)
            run = await self._make(trainer, spec, log, log.next_number, request_id)
            trainer.send(TrainerSignal.BEGIN_FIT)
            try:
                events = await run.unit()  # the first checkpoint: from here on the fit can be resumed
                await run.remember()
            except BaseException:
                trainer.stored_facts = {**trainer.stored_facts, "fit": described}
                trainer.changed()  # its schedule has got the length of the fit
                await self._close(run)
                raise
            await log.add([began(spec, run.fit.step_total), *map(new_event, events)])
            self._begin(run)
            return run.first_number

    async def _control(self, trainer: Trainer, command: Command) -> str:
        if trainer.trainer_id not in self._runs and trainer.phase is TrainerPhase.FITTING:
            async with self._starting:  # it is being resumed
                pass
        run = self._runs.get(trainer.trainer_id)
        if run is None or run.task is None:
            raise _no_fit()
        effect = run.send(FitSignal(command))
        if command is Command.CANCEL:
            await asyncio.wait([run.task])
            is_its = trainer.stored_facts["fit"]["first_number"] == run.first_number
            if is_its and _is_active(trainer) and not trainer.is_closed:
                raise _shutting_down()  # it had stopped before, and the next start resumes it
            return "ended"
        if run.phase in ENDING:
            raise _no_fit()
        told = "paused" if command is Command.PAUSE else "resumed"
        if effect is Effect.RECORD:
            await run.remember()
            if self._runs.get(trainer.trainer_id) is run:  # the current batch may have been the last
                await run.log.add([run.said(told)])
        return "paused" if command is Command.PAUSE else "running"

    async def _stop(self, run: FitRun) -> None:
        run.send(FitSignal.STOP)
        if run.task is not None:
            done, _ = await asyncio.wait([run.task], timeout=_STOP_WITHIN_S)
            if not done:
                run.task.cancel()
                await asyncio.gather(run.task, return_exceptions=True)
        if self._runs.get(run.trainer.trainer_id) is not run:
            return  # it has ended
        try:
            await run.save()
        except ServiceError as error:
            _log.warning("fit not saved", trainer_id=run.trainer.trainer_id, why=error.message)
        await self._close(run)

    async def _give_up(self, run: FitRun) -> None:
        if run.task is not None:
            run.task.cancel()
            await asyncio.gather(run.task, return_exceptions=True)
        await self._close(run)

    # --- Creation ----------------------------------------------------------------------------------

    async def _make(
        self,
        trainer: Trainer,
        spec: FitSpec,
        log: EventLog,
        first_number: int,
        request_id: str,
        state: FitState | None = None,
    ) -> FitRun:
        readers: list[DatasetSamples] = []
        try:
            evaluated = spec.eval_dataset_id or (spec.dataset_id if spec.eval_split else "")
            for dataset_id in filter(None, (spec.dataset_id, evaluated)):
                opened = await asyncio.to_thread(self._library.open, trainer.principal, dataset_id)
                kept_bytes = KEPT_BYTES if readers and spec.epochs > 1 else 0
                hosted, seed = trainer.core.hosted, trainer.spec.seed
                processing = self._processing(trainer, spec)
                check = partial(trainer.refuse_long, guard=PassGuard())
                readers.append(DatasetSamples(opened, hosted, seed, processing, kept_bytes, check))
            await asyncio.to_thread(import_parts, trainer.core, spec)
            run: FitRun

            def checkpoint(state: FitState) -> int:
                run.waiting = trainer.core.state(), state
                return -1  # the number is known once it is on disk

            def make() -> Fit:
                train, evaluation = _parts(readers, spec, trainer.spec.seed)
                folder = self._scratch_dir
                parallel = self._parallel(trainer, spec) if spec.workers > 1 else None
                return Fit(trainer.core, train, evaluation, spec, folder, checkpoint, state, parallel)

            fit = await self._trainers.engine.owner.run(make)
            reported = {(e.kind, int(e.facts["step"])) for e in log.since(first_number) if e.kind in REPEATED}
            run = FitRun(trainer, fit, spec, log, readers, first_number, request_id, reported)
            self._runs[trainer.trainer_id] = run
            return run
        except BaseException:
            for reader in readers:
                reader.close()
            raise

    def _parallel(self, trainer: Trainer, spec: FitSpec) -> DataParallel:
        base, teachers = self._trainers.models_of(trainer.spec)
        return DataParallel(trainer.core, base, teachers, spec.workers, self._launcher)

    def _processing(self, trainer: Trainer, spec: FitSpec) -> InputProcessing:
        engine = self._trainers.engine

        def process(hosted: HostedModel, given: ProcessorInput, payloads: Sequence[Payload]) -> Processed:
            processor, limits = engine.preparation.processor, engine.limits
            return processor.process_from_thread(hosted, given, payloads, limits, trainer.principal)

        options = TextOptions(spec.max_tokens, spec.truncate)
        return InputProcessing(process, options, trainer.spec.losses)

    async def _restore(self, trainer: Trainer, described: dict[str, Any]) -> None:
        spec = parse_fit_spec(described["spec"])
        first = int(described["first_number"])
        log = await self._logs.of(trainer.trainer_id)
        log.skip_to(first)
        if any(event.kind in LAST_KINDS for event in log.since(first)):
            await self._set_over(trainer, first)
            return
        attached = trainer.restored.get("fit")
        if attached is None or attached["first_number"] != first:
            raise ServiceError(
                ErrorReason.CHECKPOINT_CORRUPT,
                "the checkpoints of the fit are damaged; the trainer is as it was before it",
            )
        state = FitState.from_json(attached["state"])
        run = await self._make(trainer, spec, log, first, str(described.get("request_id", "")), state)
        if log.next_number == first:
            await log.add([began(spec, run.fit.step_total)])
        trainer.send(TrainerSignal.BEGIN_FIT)
        if described.get("is_paused"):
            run.send(FitSignal.PAUSE)
        self._begin(run)

    def _begin(self, run: FitRun) -> None:
        if self._machine.phase is FitsPhase.HOLDING:
            run.send(FitSignal.HOLD)
        run.task = begin(self._run(run), self._tasks)  # a fit still stores its end after logging it

    # --- Running -----------------------------------------------------------------------------------

    async def _run(self, run: FitRun) -> None:
        if not current_flow():  # resumed at server start, outside of a call
            set_flow(run.trainer.principal)
        last = await run.go()
        if last is not None:
            run.send(FitSignal.END)
            # Steps are counted as changes anyway; evaluations of a plateau are not, nor failed checkpoints.
            if last.kind == "failed" or not run.fit.is_saved:
                run.trainer.changed()
            await self._close(run)
            # Its last event has a number before anything else runs: the next fit begins behind it. A watcher
            # sees it when the trainer is free.
            await run.log.add([last])
            await self._set_over(run.trainer, run.first_number)

    async def _set_over(self, trainer: Trainer, first_number: int) -> None:
        """Record that a fit is over; its request id is kept, in case the call is repeated."""
        described = trainer.stored_facts.get("fit")
        if described is None or described["first_number"] != first_number:
            return  # the next fit has begun
        try:
            await trainer.remember("fit", {**described, "is_over": True})
        except ServiceError as error:  # the event log has it, too
            _log.warning("end of a fit not recorded", trainer_id=trainer.trainer_id, why=error.message)

    async def _close(self, run: FitRun) -> None:
        """Release a fit's resources, and then its trainer."""
        try:
            await run.close()
        finally:
            if self._runs.get(run.trainer.trainer_id) is run:
                del self._runs[run.trainer.trainer_id]
                run.trainer.send(TrainerSignal.END_FIT)


def _no_fit() -> ServiceError:
    return ServiceError(ErrorReason.UNKNOWN_FIT, "the trainer has no running fit")


def _shutting_down() -> ServiceError:
    return ServiceError(ErrorReason.SERVER_BUSY, "the server is shutting down")


def _is_active(trainer: Trainer) -> bool:
    """Whether a trainer's fit has not ended."""
    described = trainer.stored_facts.get("fit")
    return described is not None and not described.get("is_over")


def _parts(readers: list[DatasetSamples], spec: FitSpec, seed: int) -> tuple[Reader, Reader | None]:
    """Return what to train on and what to evaluate on: two data sets, or two parts of one."""
    if len(readers) == 1:
        return readers[0], None
    if spec.eval_dataset_id:
        return readers[0], readers[1]
    train, evaluation = split_order(len(readers[0]), spec.eval_split, seed)
    return SamplePart(readers[0], train), SamplePart(readers[1], evaluation)
