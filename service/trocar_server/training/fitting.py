"""Fits while they run: a task for each, its events, what to do with it. Belongs to one event loop.

# Note: [A fit outlives everybody]
The fit is a task of the server, not of a call: who watches may come and go. Its description lies beside the
trainer, its place in every checkpoint that it makes, the first before the fit counts as begun. So a server
that was killed goes on from the newest one, and does again what had happened since; what was told of that is
not told twice, so that whoever comes back to watch misses nothing and sees nothing again.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from enum import StrEnum, unique
from pathlib import Path
from typing import Any

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import current_flow, set_flow
from trocar_server.training.datasets.library import DatasetLibrary
from trocar_server.training.event_log import LAST_KINDS, EventLog, LoggedEvent, NewEvent
from trocar_server.training.event_logs import EventLogs
from trocar_server.training.fit import Fit
from trocar_server.training.fit_forms import parse_fit_spec
from trocar_server.training.fit_run import REPEATED, FitRun, began, new_event
from trocar_server.training.fit_samples import DatasetSamples
from trocar_server.training.fit_spec import FitSpec
from trocar_server.training.fit_state import FitState
from trocar_server.training.trainer import Trainer
from trocar_server.training.trainer_calls import TrainerActivity
from trocar_server.training.trainers import Trainers
from trocar_server.training.whole import whole

_STOP_WITHIN_S = 5.0
"""How long a stopping server waits for the present batch of a fit before it gives it up."""
_log = structlog.get_logger("trocar")


@unique
class Command(StrEnum):
    """What to do with a fit."""

    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"


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
        self._scratch_dir = scratch_dir
        self._tasks: set[asyncio.Task[None]] = set()
        self._runs: dict[str, FitRun] = {}
        self._logs = EventLogs(folder)
        self._starting = asyncio.Lock()
        self._is_stopping = False
        self._held: set[FitRun] = set()

    async def start(self, principal: str, trainer_id: str, spec: FitSpec, request_id: str = "") -> int:
        """Begin a fit, and return the number of its first event.

        Raises:
            ServiceError: `FIT_INVALID` with every problem, `UNKNOWN_TRAINER`, `UNKNOWN_DATASET`,
                `TRAINER_BUSY`, `STORAGE_FULL`, `STORAGE_UNAVAILABLE`.
        """
        trainer = await self._trainers.find(principal, trainer_id)
        return await whole(self._start(trainer, spec, request_id))

    async def watch(self, principal: str, trainer_id: str, number: int | None) -> AsyncIterator[LoggedEvent]:
        """Yield events until the fit has ended, or the server does.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`; `UNKNOWN_FIT`, there was none yet.
        """
        await self._trainers.find(principal, trainer_id)
        log = await self._logs.of(trainer_id)
        if number is None and not log.next_number:
            raise ServiceError(ErrorReason.UNKNOWN_FIT, "the trainer has had no fit yet; start one")
        async for event in log.watch(log.newest_fit_number if number is None else number):
            yield event

    async def control(self, principal: str, trainer_id: str, command: Command) -> str:
        """Pause a fit, let it go on, or end it; returns what it does then.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`; `UNKNOWN_FIT`, none is under way.
        """
        trainer = await self._trainers.find(principal, trainer_id)
        return await whole(self._control(trainer, command))

    async def restore_all(self) -> None:
        """Go on with the fits that were under way when the server ended."""
        for trainer in self._trainers.all():
            described = trainer.stored_facts.get("fit")
            if described is None or described.get("is_over"):
                continue
            try:
                await self._restore(trainer, described)
            except ServiceError as error:
                _log.warning("fit not resumed", trainer_id=trainer.trainer_id, why=error.message)
                log = await self._logs.of(trainer.trainer_id)
                facts = {"reason": error.reason, "message": error.message, "step": 0, "epoch": 0}
                await log.add([NewEvent("failed", time.time(), facts)])
                await self._set_over(trainer, int(described["first_number"]))
        await self._logs.clean(await self._trainers.stored_ids())

    async def stop(self) -> None:
        """Stop after the present batch, with a checkpoint of each; they go on at the next start."""
        self._is_stopping = True
        async with self._starting:  # one that is being begun
            runs = list(self._runs.values())
        await asyncio.gather(*(self._stop(run) for run in runs))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._logs.close()

    async def hold_all(self) -> None:
        """Let every fit wait, saved, after its present batch: until `let_go_on`, or the next start."""
        async with self._starting:  # one that is being begun
            runs = [run for run in self._runs.values() if run.goes_on.is_set()]
        for run in runs:
            run.goes_on.clear()
            self._held.add(run)
        for run in runs:
            await run.rests.wait()
            if self._runs.get(run.trainer.trainer_id) is run:  # it has not come to its end
                try:
                    await run.save()
                except ServiceError as error:
                    _log.warning("fit not saved", trainer_id=run.trainer.trainer_id, why=error.message)

    def let_go_on(self) -> None:
        """Let the fits go on that `hold_all` made wait."""
        while self._held:
            self._held.pop().goes_on.set()

    @property
    def held_count(self) -> int:
        """Return how many fits wait since `hold_all`."""
        return sum(self._runs.get(run.trainer.trainer_id) is run for run in self._held)

    async def forget(self, trainer_id: str) -> None:
        """End what is under way for a trainer that is being closed, and delete its events."""
        async with self._starting:
            run = self._runs.get(trainer_id)
        if run is not None and run.task is not None:
            run.task.cancel()
            await asyncio.gather(run.task, return_exceptions=True)
            await self._close(run)
        await self._logs.forget(trainer_id)

    # --- What callers want --------------------------------------------------------------------------

    async def _start(self, trainer: Trainer, spec: FitSpec, request_id: str) -> int:
        async with self._starting, trainer.numbering.at_rest():
            described = trainer.stored_facts.get("fit")
            if described is not None and request_id and described["request_id"] == request_id:
                return int(described["first_number"])
            if self._is_stopping:
                raise ServiceError(ErrorReason.SERVER_BUSY, "the server is being stopped")
            trainer.check_free()
            log = await self._logs.of(trainer.trainer_id)
            run = await self._make(trainer, spec, log, log.next_number, request_id)
            trainer.activity = TrainerActivity.FITTING
            try:
                events = await run.unit()  # the first checkpoint: from here on the fit can go on
                await run.remember(is_paused=False)
            except BaseException:
                trainer.stored_facts = {**trainer.stored_facts, "fit": described}
                await self._close(run)
                raise
            await log.add([began(spec, run.fit.step_total), *map(new_event, events)])
            self._begin(run)
            return run.first_number

    async def _control(self, trainer: Trainer, command: Command) -> str:
        run = self._runs.get(trainer.trainer_id)
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
            await run.remember(is_paused=is_paused)
            if self._runs.get(trainer.trainer_id) is run:  # the present batch may have been the last
                await run.log.add([run.said("paused" if is_paused else "resumed")])
        return "paused" if is_paused else "running"

    async def _stop(self, run: FitRun) -> None:
        run.is_stopping = True
        run.goes_on.set()
        if run.task is not None:
            done, _ = await asyncio.wait([run.task], timeout=_STOP_WITHIN_S)
            if not done:
                run.task.cancel()
                await asyncio.gather(run.task, return_exceptions=True)
        if self._runs.get(run.trainer.trainer_id) is not run:
            return  # it came to its end
        try:
            await run.save()
        except ServiceError as error:
            _log.warning("fit not saved", trainer_id=run.trainer.trainer_id, why=error.message)
        await self._close(run)

    # --- Making ------------------------------------------------------------------------------------

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
            for dataset_id in filter(None, (spec.dataset_id, spec.eval_dataset_id)):
                opened = await asyncio.to_thread(self._library.open, trainer.principal, dataset_id)
                readers.append(DatasetSamples(opened, trainer.core.hosted, seed=trainer.spec.seed))
            run: FitRun

            def checkpoint(state: FitState) -> int:
                run.waiting = trainer.core.state(), state
                return -1  # the number is known when it is on disk

            def make() -> Fit:
                evaluation = readers[1] if len(readers) > 1 else None
                scratch = self._scratch_dir
                return Fit(trainer.core, readers[0], evaluation, spec, scratch, checkpoint, state)

            fit = await self._trainers.engine.owner.run(make)
            told = {(e.kind, int(e.facts["step"])) for e in log.since(first_number) if e.kind in REPEATED}
            run = FitRun(trainer, fit, spec, log, readers, first_number, request_id, told)
            self._runs[trainer.trainer_id] = run
            return run
        except BaseException:
            for reader in readers:
                reader.close()
            raise

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
        is_paused = bool(described.get("is_paused"))
        trainer.activity = TrainerActivity.PAUSED if is_paused else TrainerActivity.FITTING
        self._begin(run, is_paused=is_paused)

    def _begin(self, run: FitRun, *, is_paused: bool = False) -> None:
        if not is_paused:
            run.goes_on.set()
        run.task = asyncio.create_task(self._run(run))
        self._tasks.add(run.task)  # a fit that has told its end still writes that down
        run.task.add_done_callback(self._tasks.discard)

    # --- Running -----------------------------------------------------------------------------------

    async def _run(self, run: FitRun) -> None:
        if not current_flow():  # it goes on from before the server was started
            set_flow(run.trainer.principal)
        last = await run.go()
        if last is not None:
            await self._close(run)
            await run.log.add([last])
            await self._set_over(run.trainer, run.first_number)

    async def _set_over(self, trainer: Trainer, first_number: int) -> None:
        """Remember that a fit is over; its request id stays, should the call come again."""
        described = trainer.stored_facts.get("fit")
        if described is None or described["first_number"] != first_number:
            return  # the next one has begun
        try:
            await trainer.remember("fit", {**described, "is_over": True})
        except ServiceError as error:  # its log says it, too
            _log.warning("end of a fit not noted", trainer_id=trainer.trainer_id, why=error.message)

    async def _close(self, run: FitRun) -> None:
        self._runs.pop(run.trainer.trainer_id, None)
        run.trainer.activity = TrainerActivity.READY
        await run.close()
