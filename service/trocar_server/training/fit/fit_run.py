"""Fit run: one active fit with its units of work, checkpoints and events. Belongs to one event loop."""

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.engine.engine import Engine
from trocar_server.engine.schedule.device import device_user
from trocar_server.errors import TRAINER_MOVED, ServiceError
from trocar_server.surgery import PassGuard
from trocar_server.surgery.guard import PassAborted
from trocar_server.training.files.event_log import LAST_KINDS, EventLog, NewEvent
from trocar_server.training.fit.events import FitEvent
from trocar_server.training.fit.fit import Fit
from trocar_server.training.fit.fit_samples import DatasetSamples
from trocar_server.training.fit.fit_state import FitState
from trocar_server.training.phases import (
    FIT,
    PAUSED,
    STOPPING,
    TOLD,
    WAITING,
    Effect,
    FitPhase,
    FitSignal,
    Machine,
)
from trocar_server.training.spec.fit_spec import FitSpec
from trocar_server.training.step.trainer_state import TrainerState
from trocar_server.training.trainer import Trainer

REPEATED = frozenset({"step", "epoch", "evaluation"})
"""Kinds of events that are logged at most once per step."""
_MAX_NAME_CHARACTERS = 1 << 20
"""Of all names of classes in a trainer's record; longer ones are left out of it."""
_LOOK_S = 0.2
"""How often a fit that waits for its workers looks whether it is paused or cancelled."""
_log = structlog.get_logger("trocar")


@dataclass(eq=False)
class FitRun:
    """An active or paused fit."""

    trainer: Trainer
    fit: Fit
    spec: FitSpec
    log: EventLog
    readers: list[DatasetSamples]
    first_number: int
    """Number of its first event."""
    request_id: str
    reported: set[tuple[str, int]]
    """Kind and step of events logged before the server was killed, whose work is not yet repeated."""
    waiting: tuple[TrainerState, FitState] | None = None
    """States that are to be saved as a checkpoint."""
    is_saved: bool = False
    """Whether it has been saved since it is held."""
    _machine: Machine[FitPhase, FitSignal] = field(default_factory=lambda: Machine(FIT, FitPhase.RUNNING))
    task: asyncio.Task[None] | None = None
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Set unless it is paused or held."""
    rests: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no unit of work is running."""

    def __post_init__(self) -> None:
        """Let it go on."""
        self.goes_on.set()

    @property
    def phase(self) -> FitPhase:
        """Its phase in this server."""
        return self._machine.phase

    def send(self, signal: FitSignal) -> Effect:
        """Change its phase as `phases.FIT` says, also for its trainer; return what that asks for."""
        effect = self._machine.send(signal)
        if effect is Effect.RECORD:
            self.trainer.send(TOLD[signal])
        if self.phase in WAITING:
            self.goes_on.clear()
        else:
            self.goes_on.set()
        return effect

    async def go(self) -> NewEvent | None:
        """Run to the end, and return the final event; None if the server stops or loses it before."""
        try:
            return await self._go()
        except ServiceError as error:
            if TRAINER_MOVED in error.details:
                return None  # it goes on there
            return self.said("failed", reason=error.reason, message=error.message)
        except Exception as error:  # noqa: BLE001 - an error ends only the fit, as an event, not the server
            _log.error("fit failed", trainer_id=self.trainer.trainer_id, exc_info=error)
            return self.said("failed", reason=ErrorReason.INTERNAL, message="the server failed in the fit")
        finally:
            self.rests.set()

    async def unit(self) -> list[FitEvent]:
        """Do one unit of work, including the checkpoint that it requests.

        Raises:
            ServiceError: The unit or the checkpoint failed.
        """
        engine: Engine = self.trainer.engine
        if self.fit.needs_workers and not await self._prepare():
            return []
        guard = PassGuard(None)
        device_user.set(self.trainer.trainer_id)
        events = await engine.run(lambda: self.fit.advance(guard), guard, None)
        self.trainer.use()
        if self.waiting is None:
            return events
        (state, place), self.waiting = self.waiting, None
        number = await self._save(state, place)
        return [replace(e, checkpoint=number) if e.kind == "checkpoint" else e for e in events]

    async def _prepare(self) -> bool:
        """Start the fit's workers beside the trainer's thread; returns whether the fit is to go on.

        Raises:
            ServiceError: As `Fit.prepare`.
        """
        guard = PassGuard(None)
        preparing = asyncio.create_task(asyncio.to_thread(self.fit.prepare, guard))
        try:
            while not (await asyncio.wait((preparing,), timeout=_LOOK_S))[0]:
                if self.phase is not FitPhase.RUNNING:
                    guard.cancel()
            await preparing
        except PassAborted:
            return False
        except asyncio.CancelledError:
            guard.cancel()
            preparing.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            raise
        return True

    async def save(self) -> None:
        """Write a checkpoint between two units.

        Raises:
            ServiceError: As `Trainer.save`.
        """
        state = await self.trainer.engine.owner.run(self.trainer.core.state)
        await self._save(state, self.fit.state())

    async def tell(self, events: list[FitEvent]) -> None:
        """Log events, except those already logged before the server was killed."""
        new = [event for event in events if (event.kind, event.step) not in self.reported]
        self.reported -= {(event.kind, event.step) for event in events}
        await self.log.add([*map(new_event, new)])

    async def remember(self) -> None:
        """Write the fit into the trainer's record, so that a restarted server resumes it.

        Raises:
            ServiceError: As `Trainer.remember`.
        """
        described = {
            "spec": self.spec.model_dump(mode="json"),
            "first_number": self.first_number,
            "request_id": self.request_id,
            "is_paused": self.phase in PAUSED,
            "categories": self._categories(),
        }
        await self.trainer.remember("fit", described)

    def _categories(self) -> list[str]:
        """Return the data set's names of the classes of the trainer's new head; empty if they do not fit."""
        head, names = self.trainer.spec.head, self.readers[0].categories
        is_named = head is not None and head.classes == len(names)
        return list(names) if is_named and sum(map(len, names)) <= _MAX_NAME_CHARACTERS else []

    def said(self, kind: str, **facts: Any) -> NewEvent:
        """Return an event with an external cause."""
        place = self.fit.state()
        return NewEvent(kind, time.time(), {"step": place.step, "epoch": place.epoch, **facts})

    async def close(self) -> None:
        """Release its resources."""
        await self.trainer.engine.owner.run(self.fit.close)
        for reader in self.readers:
            await asyncio.to_thread(reader.close)

    async def _go(self) -> NewEvent | None:
        while True:
            self.rests.set()
            await self.goes_on.wait()
            self.rests.clear()
            if self.phase is FitPhase.CANCELLED:
                return self.said("cancelled", message="the fit was cancelled")
            if self.phase in STOPPING:
                return None
            events = await self.unit()
            await self.tell([event for event in events if event.kind not in LAST_KINDS])
            for event in events:
                if event.kind in LAST_KINDS:
                    return new_event(event)

    async def _save(self, state: TrainerState, place: FitState) -> int:
        await self.log.sync()  # a durable checkpoint implies durable events before it
        attached = {"first_number": self.first_number, "state": place.to_json()}
        return (await self.trainer.write(state, "", attached)).number


def began(spec: FitSpec, step_total: int) -> NewEvent:
    """Return the first event of a fit."""
    facts = {"step": 0, "epoch": 0, "total_epochs": spec.epochs, "total_steps": step_total}
    return NewEvent("started", time.time(), facts)


def new_event(event: FitEvent) -> NewEvent:
    """Convert a fit's event to a log event; the log has numbers of its own."""
    facts = event.to_json()
    facts.pop("number")
    facts.pop("kind")
    return NewEvent(event.kind, float(facts.pop("time", time.time())), facts)
