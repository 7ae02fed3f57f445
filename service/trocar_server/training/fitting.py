"""Fits while they run: a task for each, its events, what to do with it. Belongs to one event loop.

# Note: [A fit outlives everybody]
The fit is a task of the server, not of a call: who watches may come and go. Its description lies beside the
trainer, its place in every checkpoint that it makes. So a server that was killed goes on from the newest one,
and tells again, with the same numbers, what had happened since.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from enum import StrEnum, unique
from pathlib import Path
from typing import Any

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard
from trocar_server.training.datasets.library import DatasetLibrary
from trocar_server.training.event_log import LAST_KINDS, EventLog, LoggedEvent
from trocar_server.training.events import Event
from trocar_server.training.fit import Fit
from trocar_server.training.fit_forms import parse_fit_spec
from trocar_server.training.fit_samples import DatasetSamples
from trocar_server.training.fit_spec import FitSpec
from trocar_server.training.fit_state import FitState
from trocar_server.training.state import TrainerState
from trocar_server.training.trainer import Trainer, TrainerActivity
from trocar_server.training.trainers import Trainers

_PROGRESS_EVENTS = ("step", "cache")
_log = structlog.get_logger("trocar")


@unique
class Command(StrEnum):
    """What to do with a fit."""

    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"


@dataclass(eq=False)
class _Run:
    """A fit that is under way, or paused."""

    trainer: Trainer
    fit: Fit
    spec: FitSpec
    log: EventLog
    readers: list[DatasetSamples]
    first_number: int
    request_id: str
    waiting: tuple[TrainerState, FitState] | None = None
    """What the fit wants to be saved."""
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.task: asyncio.Task[None] | None = None


class Fits:
    """The fits of a server's trainers.

    Args:
        trainers: Whose.
        library: What can be trained on.
        folder: Where events are kept.
        scratch_dir: Where features may lie.
    """

    def __init__(self, trainers: Trainers, library: DatasetLibrary, folder: Path, scratch_dir: Path) -> None:
        self._trainers, self._library = trainers, library
        self._folder, self._scratch_dir = folder, scratch_dir
        self._runs: dict[str, _Run] = {}
        self._logs: dict[str, EventLog] = {}
        self._starting = asyncio.Lock()

    async def start(self, principal: str, trainer_id: str, spec: FitSpec, request_id: str = "") -> int:
        """Begin a fit, and return the number of its first event.

        Raises:
            ServiceError: `FIT_INVALID` with every problem, `UNKNOWN_TRAINER`, `UNKNOWN_DATASET`,
                `TRAINER_BUSY`.
        """
        trainer = self._trainers.get(principal, trainer_id)
        async with self._starting:
            run = self._runs.get(trainer_id)
            if run is not None and request_id and run.request_id == request_id:
                return run.first_number
            trainer.check_free()
            log = await self._log_of(trainer_id)
            run = await self._make(trainer, spec, log, log.next_number, request_id)
            trainer.activity = TrainerActivity.FITTING
            try:
                await self._remember(run, is_paused=False)
                steps = run.fit.step_total
                await log.add([_began(log.next_number, spec, steps)])
            except BaseException:
                await self._close(run)
                raise
            self._begin(run)
            return run.first_number

    async def watch(self, principal: str, trainer_id: str, number: int | None) -> AsyncIterator[LoggedEvent]:
        """Yield events until the fit has ended.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`; `UNKNOWN_FIT`, there was none yet.
        """
        self._trainers.get(principal, trainer_id)
        log = await self._log_of(trainer_id)
        if number is None and not log.next_number:
            raise ServiceError(ErrorReason.UNKNOWN_FIT, "the trainer has had no fit yet; start one")
        async for event in log.watch(log.newest_fit_number if number is None else number):
            yield event

    async def control(self, principal: str, trainer_id: str, command: Command) -> str:
        """Pause a fit, let it go on, or end it; returns what it does then.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`; `UNKNOWN_FIT`, none is under way.
        """
        trainer = self._trainers.get(principal, trainer_id)
        run = self._runs.get(trainer_id)
        if run is None or run.task is None:
            raise ServiceError(ErrorReason.UNKNOWN_FIT, "the trainer has no fit that is under way")
        if command is Command.CANCEL:
            run.is_cancelled = True
            run.goes_on.set()
            await asyncio.wait([run.task])
            return "ended"
        is_paused = command is Command.PAUSE
        if is_paused == run.goes_on.is_set():
            run.goes_on.clear() if is_paused else run.goes_on.set()
            trainer.activity = TrainerActivity.PAUSED if is_paused else TrainerActivity.FITTING
            await self._remember(run, is_paused=is_paused)
            await self._tell(run, [run.fit.note("paused" if is_paused else "resumed")])
        return "paused" if is_paused else "running"

    async def restore_all(self) -> None:
        """Go on with the fits that were under way when the server ended."""
        for trainer in self._trainers.all():
            described = trainer.stored_facts.get("fit")
            if described is None:
                continue
            try:
                await self._restore(trainer, described)
            except ServiceError as error:
                _log.warning("fit not resumed", trainer_id=trainer.trainer_id, why=error.message)
                log = await self._log_of(trainer.trainer_id)
                facts = {"reason": error.reason, "message": error.message, "step": 0, "epoch": 0}
                await log.add([LoggedEvent(log.next_number, "failed", time.time(), facts)])
                await trainer.remember("fit", None)

    async def stop(self) -> None:
        """Stop after the present batch, with a checkpoint of each; they go on at the next start."""
        for run in list(self._runs.values()):
            if run.task is not None:
                run.task.cancel()
                await asyncio.gather(run.task, return_exceptions=True)
            try:
                state = await self._trainers.engine.owner.run(run.trainer.core.state)
                await self._save(run, state, run.fit.state())
            except ServiceError as error:
                _log.warning("fit not saved", trainer_id=run.trainer.trainer_id, why=error.message)
            await self._close(run)

    async def forget(self, trainer_id: str) -> None:
        """End what is under way for a trainer that is being closed, and delete its events."""
        run = self._runs.get(trainer_id)
        if run is not None and run.task is not None:
            run.task.cancel()
            await asyncio.gather(run.task, return_exceptions=True)
            await self._close(run)
        self._logs.pop(trainer_id, None)
        path = self._path(trainer_id)
        await asyncio.to_thread(path.unlink, missing_ok=True)

    # --- Making ------------------------------------------------------------------------------------

    async def _make(
        self,
        trainer: Trainer,
        spec: FitSpec,
        log: EventLog,
        first_number: int,
        request_id: str,
        state: FitState | None = None,
    ) -> _Run:
        readers: list[DatasetSamples] = []
        try:
            for dataset_id in filter(None, (spec.dataset_id, spec.eval_dataset_id)):
                opened = await asyncio.to_thread(self._library.open, trainer.principal, dataset_id)
                readers.append(DatasetSamples(opened, trainer.core.hosted, seed=trainer.spec.seed))
            run: _Run

            def checkpoint(state: FitState) -> int:
                run.waiting = trainer.core.state(), state
                return -1  # the number is known when it is on disk

            def make() -> Fit:
                evaluation = readers[1] if len(readers) > 1 else None
                scratch = self._scratch_dir
                return Fit(trainer.core, readers[0], evaluation, spec, scratch, checkpoint, state)

            fit = await self._trainers.engine.owner.run(make)
            run = _Run(trainer, fit, spec, log, readers, first_number, request_id)
            self._runs[trainer.trainer_id] = run
            return run
        except BaseException:
            for reader in readers:
                reader.close()
            raise

    async def _restore(self, trainer: Trainer, described: dict[str, Any]) -> None:
        spec = parse_fit_spec(described["spec"])
        first = int(described["first_number"])
        attached = trainer.restored.get("fit")
        state = None if attached is None else FitState.from_json(attached["state"])
        log = await self._log_of(trainer.trainer_id, before=first + 1 + (state.event if state else 0))
        run = await self._make(trainer, spec, log, first, str(described.get("request_id", "")), state)
        if log.next_number == first:
            await log.add([_began(first, spec, run.fit.step_total)])
        is_paused = bool(described.get("is_paused"))
        trainer.activity = TrainerActivity.PAUSED if is_paused else TrainerActivity.FITTING
        if is_paused:
            run.goes_on.clear()
        self._begin(run)

    def _begin(self, run: _Run) -> None:
        run.task = asyncio.create_task(self._run(run))

    # --- Running -----------------------------------------------------------------------------------

    async def _run(self, run: _Run) -> None:
        last: Event | None = None
        try:
            while not run.fit.is_over and not run.is_cancelled:
                await run.goes_on.wait()
                if run.is_cancelled:
                    break
                events = await self._advance(run)
                run.trainer.use()
                if run.waiting is not None:
                    (state, place), run.waiting = run.waiting, None
                    number = await self._save(run, state, place)
                    events = [replace(e, checkpoint=number) if e.kind == "checkpoint" else e for e in events]
                last = next((event for event in events if event.kind in LAST_KINDS), None)
                await self._tell(run, [event for event in events if event is not last])
            if last is None:
                last = run.fit.note("cancelled", message="the fit was cancelled")
        except ServiceError as error:
            last = run.fit.note("failed", reason=error.reason, message=error.message)
        except Exception as error:  # noqa: BLE001 - a fit ends with what it can say, and the server lives
            _log.error("fit failed", trainer_id=run.trainer.trainer_id, exc_info=error)
            last = run.fit.note("failed", reason=ErrorReason.INTERNAL, message="the server failed in the fit")
        await self._close(run)
        await run.trainer.remember("fit", None)
        await self._tell(run, [last])

    async def _advance(self, run: _Run) -> list[Event]:
        guard = PassGuard(None)
        return await self._trainers.engine.run(lambda: run.fit.advance(guard), guard, None)

    async def _save(self, run: _Run, state: TrainerState, place: FitState) -> int:
        return (await run.trainer.write(state, "", {"state": place.to_json()})).number

    async def _tell(self, run: _Run, events: list[Event]) -> None:
        """Log events; their numbers begin behind the one that says that the fit began."""
        await run.log.add([_logged(event, run.first_number + 1) for event in events])

    async def _remember(self, run: _Run, *, is_paused: bool) -> None:
        described = {
            "spec": run.spec.model_dump(mode="json"),
            "first_number": run.first_number,
            "request_id": run.request_id,
            "is_paused": is_paused,
        }
        await run.trainer.remember("fit", described)

    async def _close(self, run: _Run) -> None:
        self._runs.pop(run.trainer.trainer_id, None)
        run.trainer.activity = TrainerActivity.READY
        await self._trainers.engine.owner.run(run.fit.close)
        for reader in run.readers:
            await asyncio.to_thread(reader.close)

    async def _log_of(self, trainer_id: str, before: int | None = None) -> EventLog:
        if trainer_id not in self._logs:
            await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True, mode=0o700)
            log = EventLog(self._path(trainer_id))
            await asyncio.to_thread(log.load, before)
            self._logs[trainer_id] = log
        return self._logs[trainer_id]

    def _path(self, trainer_id: str) -> Path:
        return self._folder / f"{trainer_id}.jsonl"


def _began(number: int, spec: FitSpec, step_total: int) -> LoggedEvent:
    facts = {"step": 0, "epoch": 0, "total_epochs": spec.epochs, "total_steps": step_total}
    return LoggedEvent(number, "started", time.time(), facts)


def _logged(event: Event, offset: int) -> LoggedEvent:
    facts = event.to_json()
    facts.pop("number")
    facts.pop("kind")
    return LoggedEvent(offset + event.number, event.kind, float(facts.pop("time", time.time())), facts)
