"""Histories of a trainer, at one server and behind a gateway, and its model.

The model: the numbers that were sent, those that were acknowledged, and the weights after each number, which
are those of an undisturbed run.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tests.orders import trainer_calls
from tests.orders.case import asked
from tests.orders.cluster import cluster
from tests.orders.history import LEFT, STEPS, History
from tests.orders.test_cluster_routing import Routed, again, check
from tests.orders.world import served, weights_digest
from tests.support.orders.seeded_loop import run
from trocar_api.v1 import trainer_pb2

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from tests.support.orders.doorway import Call


@cache
def undisturbed() -> list[str]:
    """Return digests of the weights after each number of steps, one after another."""

    async def steps(folder: Path) -> list[str]:
        async with served(folder, "a", models=trainer_calls.SETTINGS["models"]) as server:
            trainer_id = await trainer_calls.create(server)
            (trainer,) = server.app.trainers.all()
            digests = [weights_digest(trainer)]
            for number in range(STEPS):
                await asked(server, "TrainerService/Train", *trainer_calls.batch(trainer_id, number))
                digests.append(weights_digest(trainer))
            return digests

    with TemporaryDirectory() as folder:
        return run(0, steps(Path(folder)))


class Steps(History):
    """Steps of one trainer, several on their way at once, and its checkpoints."""

    settings = trainer_calls.SETTINGS
    is_shared = True

    def prepare(self) -> None:
        self.trainer_id = self.run(trainer_calls.create(self.server))
        self.sent = 0

    def trainer(self) -> Any:
        (trainer,) = self.server.app.trainers.all()
        return trainer

    @rule()
    def step(self) -> None:
        self.call(self.sent, "TrainerService/Train", *trainer_calls.batch(self.trainer_id, self.sent))
        self.sent += 1

    def resend_cut_off(self) -> None:
        for number in sorted({number for number in self.cut if number is not None}):
            self.call(number, "TrainerService/Train", *trainer_calls.batch(self.trainer_id, number))
        self.cut.clear()

    @rule()
    def save(self) -> None:
        self.call(
            None, "TrainerService/SaveTrainer", trainer_pb2.SaveTrainerRequest(trainer_id=self.trainer_id)
        )

    @rule()
    def resend(self) -> None:
        """Send every step again, in order: each is answered, and was applied once."""
        self.rest()

        async def again() -> None:
            for number in range(max(0, self.sent - 60), self.sent):
                await asked(
                    self.server, "TrainerService/Train", *trainer_calls.batch(self.trainer_id, number)
                )

        self.run(again())
        trainer = self.trainer()
        assert trainer.core.update_count == trainer.numbering.next_number == self.sent

    def answered(self, what: int | None, call: Call) -> None:
        assert call.answer.code in ("OK", "GONE", "CANCELLED", "ABORTED"), call.answer
        trainer = self.trainer()
        if what is not None and call.answer.is_ok:
            assert trainer.numbering.next_number > what

    @invariant()
    def weights_are_those_of_the_steps(self) -> None:
        if not hasattr(self, "trainer_id") or self.open:
            return
        trainer = self.trainer()
        assert weights_digest(trainer) == undisturbed()[trainer.core.update_count]


TRAIN = Routed("TrainerService/Train", trainer_calls.step)


class Routing(Steps):
    """The same behind a gateway; the server of the trainer is lost, or stops, and another takes over."""

    def opened(self) -> AbstractAsyncContextManager[Any]:
        return cluster(self.folder)

    def trainer(self) -> Any:
        nodes = self.server
        (trainer,) = [
            trainer
            for name, server in nodes.servers.items()
            if name not in nodes.lost
            for trainer in server.app.trainers.all()
        ]
        return trainer

    def left(self) -> list[str]:
        check(self.server, self.tasks)
        return []

    @precondition(lambda self: not self.server.lost)
    @rule(is_stop=st.booleans())
    def lose(self, is_stop: bool) -> None:
        nodes = self.server
        (home,) = [name for name, server in nodes.servers.items() if server.app.trainers.all()]
        self.run(nodes.stop(home) if is_stop else nodes.lose(home))

    def resend_cut_off(self) -> None:
        """Send again what was not acknowledged, as a client does: the steps after it wait for it."""

        async def repeated(number: int, call: Call) -> None:
            answer = await asyncio.wait_for(call.ended(), 600)
            if not answer.is_ok:
                answer = await again(self.server, TRAIN, trainer_calls.batch(self.trainer_id, number))
            assert answer.is_ok, (number, answer)

        async def all_repeated() -> None:
            await asyncio.gather(*(repeated(what, call) for what, call in self.open if what is not None))

        self.run(all_repeated())

    def answered(self, what: int | None, call: Call) -> None:
        assert call.answer.code in ("OK", *LEFT, "ABORTED", "UNAVAILABLE", "RESOURCE_EXHAUSTED"), call.answer

    def rested(self) -> None:
        """Check that every step was acknowledged, and is applied still."""
        assert self.trainer().numbering.next_number == self.sent
