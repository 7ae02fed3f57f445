"""Histories of a fit: pauses, cancellations, drains and restarts at any moment of it, and its model.

The model: whether a fit is active, whether its user has paused it, and whether the server drains.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.orders.fit_calls import CONTROL, START, request
from tests.orders.history import History, turns
from tests.orders.stored_calls import shard, stored
from tests.orders.trainer_calls import SETTINGS, create
from trocar_api.v1 import fit_pb2 as pb
from trocar_api.v1 import server_pb2
from trocar_server.training.phases import HELD, PAUSED, WAITING

ENDLESS = 100_000


class Controls(History):
    """Controls of one fit that never ends by itself, one after the other, at any turn of the loop."""

    settings = SETTINGS

    def prepare(self) -> None:
        self.trainer_id = self.run(create(self.server))
        self.dataset_id = self.run(stored(self.server, "digits", shard(0), shard(1)))
        self.is_active = self.is_paused = self.is_draining = False
        self.started = 0

    def trainer(self) -> Any:
        (trainer,) = self.server.app.trainers.all()
        return trainer

    @precondition(lambda self: not self.is_active and not self.is_draining)
    @rule()
    def start(self) -> None:
        spec = pb.FitSpec(dataset_id=self.dataset_id, epochs=ENDLESS, batch_size=2, checkpoint_every=4)
        self.started += 1
        asked = pb.StartFitRequest(trainer_id=self.trainer_id, spec=spec, request_id=f"{self.started:032x}")
        assert self.ask(START, asked).is_ok
        self.is_active, self.is_paused = True, False
        self.check()

    @rule(command=st.sampled_from([pb.FIT_COMMAND_PAUSE, pb.FIT_COMMAND_RESUME, pb.FIT_COMMAND_CANCEL]))
    def control(self, command: pb.FitCommand.ValueType) -> None:
        answer = self.ask(CONTROL, *request(self.trainer_id, command))
        assert answer.is_ok is (self.is_active and not self.is_draining), answer
        if answer.is_ok:
            self.is_paused = command == pb.FIT_COMMAND_PAUSE
            self.is_active = command != pb.FIT_COMMAND_CANCEL
        self.check()

    @rule(drains=st.booleans())
    def drain(self, drains: bool) -> None:
        action = server_pb2.DRAIN_ACTION_START if drains else server_pb2.DRAIN_ACTION_UNDO
        assert self.ask("ServerService/Drain", server_pb2.DrainRequest(action=action)).is_ok
        self.is_draining = drains
        self.check()

    @rule()
    def restart(self) -> None:
        """Stop the server, and start it again: what its user asked for is kept, and a drain is not."""
        before = self.steps()
        self.run(self.stack.aclose())
        self.server = self.run(self.stack.enter_async_context(self.opened()))
        self.run(self.all_ready())
        self.tasks = self.run(self.all_tasks())
        self.is_draining = False
        self.check()
        assert self.steps() >= before

    async def all_ready(self) -> None:
        await self.server.app.trainers.ready.wait()

    @rule(count=turns)
    def wait(self, count: int) -> None:
        """Let a fit that waits do no further step."""

        async def some() -> int:
            if runs:
                await runs[0].rests.wait()
            reached = self.steps()
            for _ in range(count):
                await asyncio.sleep(0.01)
            return reached

        runs = [run for run in self.server.app.fits._runs.values() if run.phase in WAITING]
        reached = self.run(some())
        if runs:
            assert self.steps() == reached
        self.check()

    def steps(self) -> int:
        """Return the steps that the trainer has taken."""
        return int(self.trainer().core.step_count)

    def check(self) -> None:
        """Compare the states of trainer and fit with the model."""
        shown = "paused" if self.is_paused and self.is_active else "fitting" if self.is_active else "ready"
        assert self.trainer().state == shown
        runs = list(self.server.app.fits._runs.values())
        assert len(runs) == self.is_active
        for run in runs:
            assert (run.phase in PAUSED, run.phase in HELD) == (self.is_paused, self.is_draining)

    def left(self) -> list[str]:
        return []  # a fit that goes on is no leak

    def rest(self) -> None:
        """Compare, without a wait for a fit that never ends."""
        if hasattr(self, "trainer_id"):
            self.check()
