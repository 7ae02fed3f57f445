"""One fit that is under way: its units of work, its checkpoints, what it tells. Belongs to one event loop."""

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard
from trocar_server.training.event_log import LAST_KINDS, EventLog, NewEvent
from trocar_server.training.events import Event
from trocar_server.training.fit import Fit
from trocar_server.training.fit_samples import DatasetSamples
from trocar_server.training.fit_spec import FitSpec
from trocar_server.training.fit_state import FitState
from trocar_server.training.state import TrainerState
from trocar_server.training.trainer import Trainer

REPEATED = frozenset({"step", "epoch", "evaluation"})
"""What is told once of each step."""
_log = structlog.get_logger("trocar")


@dataclass(eq=False)
class FitRun:
    """A fit that is under way, or paused."""

    trainer: Trainer
    fit: Fit
    spec: FitSpec
    log: EventLog
    readers: list[DatasetSamples]
    first_number: int
    """Of its first event."""
    request_id: str
    told: set[tuple[str, int]]
    """Kinds and steps that were told before the server was killed, and not yet done again."""
    waiting: tuple[TrainerState, FitState] | None = None
    """What the fit wants to be saved."""
    is_cancelled: bool = False
    is_stopping: bool = False
    """Whether the server ends."""
    task: asyncio.Task[None] | None = None
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Set unless it is paused."""
    rests: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no unit of work is under way."""

    async def go(self) -> NewEvent | None:
        """Run to the end, and return how it ended; None when the server ends before."""
        try:
            return await self._go()
        except ServiceError as error:
            return self.said("failed", reason=error.reason, message=error.message)
        except Exception as error:  # noqa: BLE001 - a fit ends with what it can say, and the server lives
            _log.error("fit failed", trainer_id=self.trainer.trainer_id, exc_info=error)
            return self.said("failed", reason=ErrorReason.INTERNAL, message="the server failed in the fit")
        finally:
            self.rests.set()

    async def unit(self) -> list[Event]:
        """Do one unit of work, with the checkpoint that follows from it.

        Raises:
            ServiceError: What fails in it.
        """
        engine: Engine = self.trainer.engine
        guard = PassGuard(None)
        events = await engine.run(lambda: self.fit.advance(guard), guard, None)
        self.trainer.use()
        if self.waiting is None:
            return events
        (state, place), self.waiting = self.waiting, None
        number = await self._save(state, place)
        return [replace(e, checkpoint=number) if e.kind == "checkpoint" else e for e in events]

    async def save(self) -> None:
        """Write a checkpoint between two units.

        Raises:
            ServiceError: As `Trainer.save`.
        """
        state = await self.trainer.engine.owner.run(self.trainer.core.state)
        await self._save(state, self.fit.state())

    async def tell(self, events: list[Event]) -> None:
        """Log events, but those that were told before the server was killed."""
        new = [event for event in events if (event.kind, event.step) not in self.told]
        self.told -= {(event.kind, event.step) for event in events}
        await self.log.add([*map(new_event, new)])

    async def remember(self, *, is_paused: bool) -> None:
        """Write the fit into the trainer's record: a server that is started anew goes on with it.

        Raises:
            ServiceError: As `Trainer.remember`.
        """
        described = {
            "spec": self.spec.model_dump(mode="json"),
            "first_number": self.first_number,
            "request_id": self.request_id,
            "is_paused": is_paused,
        }
        await self.trainer.remember("fit", described)

    def said(self, kind: str, **facts: Any) -> NewEvent:
        """Make an event of what happened to the fit from outside."""
        place = self.fit.state()
        return NewEvent(kind, time.time(), {"step": place.step, "epoch": place.epoch, **facts})

    async def close(self) -> None:
        """Free what it holds."""
        await self.trainer.engine.owner.run(self.fit.close)
        for reader in self.readers:
            await asyncio.to_thread(reader.close)

    async def _go(self) -> NewEvent | None:
        while not self.is_cancelled:
            self.rests.set()
            await self.goes_on.wait()
            self.rests.clear()
            if self.is_stopping:
                return None
            if self.is_cancelled:
                break
            events = await self.unit()
            await self.tell([event for event in events if event.kind not in LAST_KINDS])
            for event in events:
                if event.kind in LAST_KINDS:
                    return new_event(event)
        return self.said("cancelled", message="the fit was cancelled")

    async def _save(self, state: TrainerState, place: FitState) -> int:
        await self.log.sync()  # what was told before is there, where the checkpoint is
        attached = {"first_number": self.first_number, "state": place.to_json()}
        return (await self.trainer.write(state, "", attached)).number


def began(spec: FitSpec, step_total: int) -> NewEvent:
    """Make the first event of a fit."""
    facts = {"step": 0, "epoch": 0, "total_epochs": spec.epochs, "total_steps": step_total}
    return NewEvent("started", time.time(), facts)


def new_event(event: Event) -> NewEvent:
    """Make an event for the log of one of a fit, which numbers them for itself."""
    facts = event.to_json()
    facts.pop("number")
    facts.pop("kind")
    return NewEvent(event.kind, float(facts.pop("time", time.time())), facts)
