"""Stop of a server whose device is held: what is durable is written, and the process ends all the same.

# Note: [A pass that cannot be stopped]
A deadline, a cancellation and a stop end a pass between modules. Inside one operator of torch nothing does,
and no thread can be killed. So when the grace period is over and the same work still holds the device, its
thread is left to itself: another one serves what waits, so that changed trainers and fits are saved, and the
process ends without it. A trainer whose own step holds the device stays as at its last checkpoint, or in its
journal.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.training.fit.fitting import Fits
from trocar_server.training.phases import TrainerPhase
from trocar_server.training.trainers import Trainers

EXIT_HELD = 75
"""Exit code of a server that was stopped while its device was held: a call got no answer."""
_LOOK_S = 1.0
"""The same work has to hold the device so long after the grace period."""
_SAVE_S = 10.0
"""The most seconds for what is saved after that."""
_POLL_S = 0.05


@dataclass(frozen=True)
class Stopping:
    """The stop of a server, with an end.

    Args:
        engine: Has the device.
        trainers: Are saved.
        fits: Are saved, too.
        grace_s: Seconds for calls that run.
        log: Logger.
    """

    engine: Engine
    trainers: Trainers
    fits: Fits
    grace_s: float
    log: Any

    async def run(self, stop: Coroutine[Any, Any, None]) -> None:
        """Stop, and end the process where its device stays held beyond the grace period."""
        owner, stopping = self.engine.owner, asyncio.create_task(stop)
        await asyncio.wait((stopping,), timeout=self.grace_s)
        while not stopping.done():
            holder = owner.holder
            await asyncio.wait((stopping,), timeout=_LOOK_S)
            if not stopping.done() and holder is not None and owner.holder is holder:
                facts = {"user": holder.user, "held_s": round(holder.held_s, 1), "exit_code": EXIT_HELD}
                self.log.error("the device is held: the process ends without that work", **facts)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_SAVE_S):
                        await self._save(stopping, holder.user)
                end_now(EXIT_HELD)
        await stopping

    async def _save(self, stopping: "asyncio.Task[None]", user: str) -> None:
        """Save what can be saved without the work that holds the device."""
        trainers = [trainer for trainer in self.trainers.all() if trainer.trainer_id != user]
        is_of_trainer = len(trainers) < len(self.trainers.all())
        # A fit whose step fails would be over; it goes on at the next start, from its checkpoint.
        self.engine.owner.abandon(settles=not is_of_trainer)
        if not is_of_trainer:
            await asyncio.wait((stopping,))
            return
        for trainer in trainers:
            if trainer.phase is TrainerPhase.READY:
                with suppress(ServiceError):
                    await trainer.save_changes()
        while not self.fits.running_ids <= {user}:  # noqa: ASYNC110 - the stop saves these, and tells nobody
            await asyncio.sleep(_POLL_S)


def end_now(exit_code: int) -> None:
    """End the process, whatever its threads do."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)
