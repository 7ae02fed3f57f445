"""Histories of calls that overlap: each begins, goes on for some turns of the loop, and may be cut off.

The model of the engine: of the calls that are open at most as many have a replica as there are, the others
wait, and each is answered as if it were alone. The model of a trainer: the numbers that were sent, those that
were acknowledged, and the weights after each number, which are those of an undisturbed run.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.orders import server_calls, trainer_calls
from tests.orders.case import asked
from tests.orders.world import leaks, served, settled, weights_digest
from tests.support.models.tiny_models import Plain
from tests.support.orders.amount import AMOUNT, SEED
from tests.support.orders.seeded_loop import SeededLoop, run
from tests.support.servers.serving import custom
from tests.support.wire.wire import chunk, request, tensor
from trocar_api.v1 import extraction_pb2, model_pb2, trainer_pb2
from trocar_server.engine.schedule.lease import ReplicaPool
from trocar_server.training.numbering import Numbering

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.support.orders.doorway import Call

Result = TypeVar("Result")
HISTORIES = 2 if AMOUNT < 0 else 30 * (AMOUNT or 4)
STEPS = 25
seeds = st.integers(0, 2**16)
turns = st.integers(1, 30)
which = st.integers(0, 100)


class History(RuleBasedStateMachine):
    """A server on a loop of its own, and calls that are open."""

    settings: ClassVar[dict[str, Any]] = {}
    is_shared: ClassVar[bool] = False

    @initialize(seed=seeds)
    def begin(self, seed: int) -> None:
        self.folder = Path(mkdtemp())
        self.loop = SeededLoop(seed)
        self.stack = AsyncExitStack()
        context = served(self.folder, "a", is_shared=self.is_shared, **self.settings)
        self.server = self.run(self.stack.enter_async_context(context))
        self.tasks = self.run(self.all_tasks())
        self.open: list[tuple[Any, Call]] = []
        self.cut: list[Any] = []
        self.prepare()

    def prepare(self) -> None:
        """Make what the calls are for."""

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run_until_complete(work)

    async def all_tasks(self) -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks() - {asyncio.current_task()}

    def call(self, what: Any, method: str, *messages: Any) -> None:
        async def begun() -> Call:
            return self.server.door.begin(method, *messages)

        self.open.append((what, self.run(begun())))

    @rule(count=turns)
    def go_on(self, count: int) -> None:
        async def some() -> None:
            for _ in range(count):
                await asyncio.sleep(0)

        self.run(some())

    @precondition(lambda self: self.open)
    @rule(number=which, is_lost=st.booleans())
    def cut_off(self, number: int, is_lost: bool) -> None:
        what, call = self.open[number % len(self.open)]
        self.cut.append(what)

        async def cut() -> None:
            (call.disconnect if is_lost else call.cancel)()

        self.run(cut())

    @rule()
    def rest(self) -> None:
        """Let all calls end, and check what they have left."""
        self.resend_cut_off()

        async def ended() -> list[str]:
            for _, call in self.open:
                await asyncio.wait_for(call.ended(), 600)
            await settled(self.tasks)
            return leaks(self.server, self.tasks)

        left = self.run(ended())
        assert not left, left
        for what, call in self.open:
            self.answered(what, call)
        self.open.clear()

    def resend_cut_off(self) -> None:
        """Send calls again that others wait for."""

    def answered(self, what: Any, call: Call) -> None:
        """Compare an answer with the model."""

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self.rest()
        finally:
            self.run(self.stack.aclose())
            self.run(self.loop.shutdown_asyncgens())
            self.loop.close()
            shutil.rmtree(self.folder)


class Engine(History):
    """Passes of one model, which is unloaded and loaded meanwhile."""

    replica_count: ClassVar[int] = 1
    settings: ClassVar[dict[str, Any]] = {
        "models": {"plain": custom(Plain, server_calls.SHAPE)},
        "limits": {"feature_cache_bytes": 0},
    }

    def prepare(self) -> None:
        self.alone: dict[int, bytes] = {}

    @rule(numbers=st.lists(st.integers(0, 3), min_size=1, max_size=4))
    def several(self, numbers: list[int]) -> None:
        for number in numbers:
            self.extract(number)

    def extract(self, seed: int) -> None:
        data = server_calls.values(seed)
        inputs = [tensor((2, *server_calls.SHAPE))]
        self.call(
            seed,
            "ExtractionService/Extract",
            request("plain", "conv", inputs=inputs, chunks=[chunk(data)]),
        )

    @rule(count=turns)
    def cut_off_one_that_waits(self, count: int) -> None:
        """Cut a call off around the moment when it gets the replica of the one before it."""
        self.extract(0)
        self.extract(1)
        self.go_on(count)
        self.cut_off(len(self.open) - 1, is_lost=False)

    @rule(is_there=st.booleans())
    def load(self, is_there: bool) -> None:
        kind = model_pb2.LoadModelRequest if is_there else model_pb2.UnloadModelRequest
        name = "LoadModel" if is_there else "UnloadModel"
        self.call(None, f"ModelService/{name}", kind(model_id="plain"))

    def answered(self, what: int | None, call: Call) -> None:
        if what is None or not call.answer.is_ok:
            assert call.answer.code in (
                "OK",
                "GONE",
                "CANCELLED",
                "FAILED_PRECONDITION",
                "RESOURCE_EXHAUSTED",
            )
            return
        replies = map(extraction_pb2.ExtractResponse.FromString, call.answer.replies)
        values = b"".join(one.data for reply in replies for one in reply.chunks)
        assert values == self.alone.setdefault(what, values)

    @invariant()
    def replicas_are_lent_once(self) -> None:
        for deployment in self.server.app.engine.deployments.values() if hasattr(self, "server") else ():
            pool = deployment.pool
            assert 0 <= pool.leased_count <= pool.count == self.replica_count
            assert pool.leased_count + pool.waiting_count <= len(self.open)


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
        (trainer,) = self.server.app.trainers.all()
        assert trainer.core.update_count == trainer.numbering.next_number == self.sent

    def answered(self, what: int | None, call: Call) -> None:
        assert call.answer.code in ("OK", "GONE", "CANCELLED", "ABORTED"), call.answer
        (trainer,) = self.server.app.trainers.all()
        if what is not None and call.answer.is_ok:
            assert trainer.numbering.next_number > what

    @invariant()
    def weights_are_those_of_the_steps(self) -> None:
        if not hasattr(self, "trainer_id") or self.open:
            return
        (trainer,) = self.server.app.trainers.all()
        assert weights_digest(trainer) == undisturbed()[trainer.core.update_count]


def histories(kind: type[History]) -> Any:
    case = kind.TestCase
    case.settings = settings(
        max_examples=HISTORIES,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],
    )
    return case


@pytest.mark.parametrize("kind", [Engine, Steps], ids=lambda kind: kind.__name__)
def test_calls_that_overlap(kind: type[History]) -> None:
    from hypothesis import seed
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(seed(SEED)(kind), settings=histories(kind).settings)


SEEDS = range(5)


def hand_over(seed: int) -> None:
    """Cut a call off when it has been given a replica, and has not gone on yet."""
    history = Engine()
    history.begin(seed=seed)
    (deployment,) = history.server.app.engine.deployments.values()

    lease = deployment.pool.lease(None)

    async def cut() -> None:
        await lease.__aexit__(None, None, None)
        history.open[0][1].cancel()

    try:
        history.run(lease.__aenter__())
        history.extract(0)
        while not deployment.pool.waiting_count:
            history.go_on(count=1)
        history.run(cut())
    finally:
        history.teardown()


def two_steps(seed: int) -> None:
    """Send the second step before the first has ended, and the first once more."""
    history = Steps()
    history.begin(seed=seed)
    try:
        history.step()
        history.step()
        history.cut_off(number=0, is_lost=False)
        history.rest()
        history.weights_are_those_of_the_steps()
    finally:
        history.teardown()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_replica_that_is_lost_in_a_hand_over_is_noticed(seed: int) -> None:
    hand_over(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplicaPool, "_return", lambda *_: None)
        with pytest.raises(AssertionError, match="leases of plain: 1"):
            hand_over(seed)


def is_noticed(seed: int) -> bool:
    """Whether two steps of this order of the loop show a fault."""
    try:
        two_steps(seed)
    except AssertionError:
        return True
    return False


def test_a_step_out_of_turn_is_noticed() -> None:
    """In one of twenty orders, of which most show it: which do depends on all awaits of a step."""

    async def at_once(self: Any, number: int) -> None:
        """Do not wait for the steps before."""
        self.next_number = max(self.next_number, number)

    assert not any(map(is_noticed, SEEDS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Numbering, "_wait", at_once)
        assert any(map(is_noticed, range(20)))
