"""Who gets a replica, when, and who is told to come again."""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.priority import Priority
from trocar_server.engine.schedule.lease import Replica, ReplicaPool
from trocar_server.errors import ServiceError
from trocar_server.models import Pristine, set_flow


def pool(replica_count: int = 1, max_queue: int = 64) -> ReplicaPool:
    return ReplicaPool([Replica(Pristine(nn.Identity())) for _ in range(replica_count)], max_queue)


async def turns(count: int = 10) -> None:
    """Let the event loop run everything that is ready."""
    for _ in range(count):
        await asyncio.sleep(0)


class Caller:
    """A task that asks for a replica and keeps it until it is told to give it back."""

    def __init__(self, of: ReplicaPool, deadline: float | None = None, flow: str | None = None) -> None:
        self._pool, self._deadline, self._flow = of, deadline, flow
        self.done = asyncio.Event()
        self.replica: Replica | None = None
        self.task = asyncio.ensure_future(self._call())

    async def _call(self) -> None:
        async with self._pool.lease(self._deadline, flow=self._flow) as self.replica:
            await self.done.wait()

    async def give_back(self) -> None:
        self.done.set()
        await self.task


async def all_back(callers: Sequence[Caller]) -> None:
    """Let callers keep what they get for no time, in whatever order they get it."""
    for caller in callers:
        caller.done.set()
    await asyncio.gather(*(caller.task for caller in callers))


async def test_every_replica_is_lent_before_anyone_waits() -> None:
    two = pool(2)
    async with two.lease(None) as first, two.lease(None) as second:
        assert first is not second
        assert two.leased_count == 2
    assert two.leased_count == 0


async def test_a_replica_comes_back_when_its_borrower_fails() -> None:
    one = pool()
    with pytest.raises(ValueError, match="mine"):
        async with one.lease(None):
            raise ValueError("mine")
    assert one.leased_count == 0


async def test_who_came_first_is_served_first() -> None:
    one = pool()
    callers = [Caller(one) for _ in range(5)]
    order: list[int] = []
    for number, caller in enumerate(callers):
        await turns()
        order += [number for waiting in callers[number:] if waiting.replica is not None]
        await caller.give_back()
    assert order == [0, 1, 2, 3, 4]


async def test_nobody_passes_by_those_who_wait() -> None:
    """Between the return of a replica and the waking of the next in line, too."""
    one = pool()
    async with one.lease(None):
        waiting = Caller(one)
        await turns()
    late = Caller(one)
    await turns()
    assert waiting.replica is not None
    assert late.replica is None
    await waiting.give_back()
    await late.give_back()


async def test_a_full_queue_is_refused_at_once() -> None:
    one = pool(max_queue=2)
    async with one.lease(None):
        waiting = [Caller(one), Caller(one)]
        await turns()
        with pytest.raises(ServiceError) as caught:
            async with one.lease(None):
                pass
    assert caught.value.reason is ErrorReason.SERVER_BUSY
    assert "2 calls already wait" in caught.value.message
    for caller in waiting:
        await caller.give_back()


async def test_a_place_in_the_queue_is_free_again_when_its_owner_gives_up() -> None:
    one = pool(max_queue=1)
    async with one.lease(None):
        for _ in range(3):
            caller = Caller(one)
            await turns()
            caller.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller.task
    assert one.leased_count == 0


async def test_the_wait_is_shorter_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else "busy" would show as a deadline error."""
    waits: list[float | None] = []
    timeout = asyncio.timeout

    def at_once(delay_s: float | None) -> asyncio.Timeout:
        waits.append(delay_s)
        return timeout(0)

    one = pool()
    async with one.lease(None):
        monkeypatch.setattr(time, "monotonic", lambda: 100.0)
        monkeypatch.setattr(asyncio, "timeout", at_once)
        with pytest.raises(ServiceError) as caught:
            async with one.lease(110.0):
                pass
    assert caught.value.reason is ErrorReason.SERVER_BUSY
    assert waits[0] is not None
    assert 5 < waits[0] < 10


async def test_a_deadline_that_is_over_is_not_waited_for() -> None:
    one = pool()
    async with one.lease(None):
        with pytest.raises(ServiceError) as caught:
            async with one.lease(time.monotonic() - 1):
                pass
    assert caught.value.reason is ErrorReason.SERVER_BUSY


async def test_draining_waits_for_the_last_borrower() -> None:
    two = pool(2)
    borrower = Caller(two)
    await turns()
    draining = asyncio.ensure_future(two.drain())
    await turns()
    assert not draining.done()
    await borrower.give_back()
    await draining


async def test_those_who_wait_are_served_before_a_pool_is_drained() -> None:
    one = pool()
    borrower, waiting = Caller(one), Caller(one)
    await turns()
    draining = asyncio.ensure_future(one.drain())
    await turns()
    await borrower.give_back()
    await turns()
    assert waiting.replica is not None
    assert not draining.done()
    await waiting.give_back()
    await draining


async def test_a_run_has_all_its_steps_before_a_pool_is_drained() -> None:
    one = pool()
    with one.run():
        draining = asyncio.ensure_future(one.drain())
        await turns()
        for _ in range(3):
            async with one.lease(None, is_step=True):
                await turns()
            assert not draining.done()
        with pytest.raises(ServiceError, match="was unloaded"):
            async with one.lease(None):
                pass
        with pytest.raises(ServiceError, match="was unloaded"), one.run():
            pass
    await draining


async def test_nobody_waits_for_a_pool_that_was_drained() -> None:
    """A call that looked up the model just before it was unloaded would wait forever."""
    one = pool()
    await one.drain()
    caller = Caller(one)
    await turns()
    is_done = caller.task.done()
    caller.task.cancel()
    assert is_done
    with pytest.raises(ServiceError):
        await caller.task


async def test_no_replica_is_lost_whenever_callers_are_cancelled() -> None:
    chance = random.Random(0)
    three = pool(3, max_queue=1000)

    async def call(turn_count: int) -> None:
        async with three.lease(None):
            await turns(turn_count)

    tasks = []
    for _ in range(300):
        tasks.append(asyncio.ensure_future(call(chance.randrange(5))))
        await turns(chance.randrange(3))
        if chance.random() < 0.5:
            chance.choice(tasks).cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert three.leased_count == 0
    async with three.lease(None), three.lease(None), three.lease(None):
        assert three.leased_count == 3


async def order_of(one: ReplicaPool, asked: list[tuple[str, str, dict[str, Any]]]) -> list[str]:
    """Let named callers of flows ask while the replica is lent, and return in which order they got it."""
    order: list[str] = []

    async def call(name: str, flow: str, options: dict[str, Any]) -> None:
        async with one.lease(None, flow=flow, **options):
            order.append(name)

    async with one.lease(None, flow="before"):
        tasks = [asyncio.ensure_future(call(*entry)) for entry in asked]
        await turns()
    await asyncio.gather(*tasks)
    return order


async def test_a_caller_with_one_call_is_served_at_the_next_turn_of_a_flood() -> None:
    one = pool(max_queue=500)
    flood: list[tuple[str, str, dict[str, Any]]] = [(f"flood {n}", "flood", {}) for n in range(200)]
    order = await order_of(one, [*flood, ("single", "single", {})])
    assert order.index("single") == 1
    assert [name for name in order if name != "single"] == [name for name, _, _ in flood]


async def test_large_batches_come_as_seldom_as_their_rows_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    one = pool(max_queue=500)
    one.throughput.observe = lambda rows, seconds: None  # type: ignore[method-assign]
    monkeypatch.setattr(one._line, "charge", lambda flow, cost: None)  # no time passes in this test
    large = [("large", "a", {"rows": 8}) for _ in range(20)]
    small = [("small", "b", {"rows": 1}) for _ in range(160)]
    order = await order_of(one, [*large, *small])
    assert 4 <= order[:45].count("large") <= 8


async def test_priorities_order_the_calls_of_one_flow_only() -> None:
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("a low", "a", {"priority": Priority.LOW}),
        ("a normal", "a", {}),
        ("b", "b", {}),
        ("a high", "a", {"priority": Priority.HIGH}),
    ]
    assert await order_of(pool(), calls) == ["a high", "b", "a normal", "a low"]


async def test_the_flow_is_that_of_the_call() -> None:
    one = pool()
    order: list[str] = []

    async def call(name: str, flow: str) -> None:
        set_flow(flow)
        async with one.lease(None):
            order.append(name)

    async with one.lease(None):
        tasks = [asyncio.ensure_future(call(*entry)) for entry in (("a0", "a"), ("a1", "a"), ("b", "b"))]
        await turns()
    await asyncio.gather(*tasks)
    assert order == ["a0", "b", "a1"]


async def test_a_full_line_makes_room_for_a_flow_with_less_than_its_share() -> None:
    one = pool(max_queue=4)
    async with one.lease(None):
        flood = [Caller(one, flow="flood") for _ in range(4)]
        await turns()
        single = Caller(one, flow="single")
        await turns()
        assert [caller.task.done() for caller in flood] == [False, False, False, True]
        with pytest.raises(ServiceError, match="others share the queue") as caught:
            await flood[3].task
        assert caught.value.reason is ErrorReason.SERVER_BUSY
        assert one.waiting_count == 4
    await all_back([*flood[:3], single])


async def test_a_full_line_makes_no_room_where_that_would_only_swap_places() -> None:
    one = pool(max_queue=2)
    async with one.lease(None):
        callers = [Caller(one, flow="a"), Caller(one, flow="b")]
        await turns()
        with pytest.raises(ServiceError, match="2 calls already wait"):
            async with one.lease(None, flow="c"):
                pass
    await all_back(callers)


class Clock:
    """What `time.monotonic` says, under a test's control."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


async def practised(clock: Clock, one: ReplicaPool, seconds: float = 1.0) -> None:
    """Let a pool learn how long a row takes."""
    for _ in range(20):
        async with one.lease(None, flow="before"):
            clock.now += seconds


async def test_a_call_that_would_come_too_late_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, one = Clock(monkeypatch), pool()
    await practised(clock, one)
    async with one.lease(None, flow="a"):
        waiting = [Caller(one, flow="a") for _ in range(3)]
        await turns()
        with pytest.raises(ServiceError, match="4 s of work wait before") as caught:
            async with one.lease(clock.now + 2, flow="a"):
                pass
        assert caught.value.reason is ErrorReason.SERVER_BUSY
        assert caught.value.retry_after_s == pytest.approx(4)
        in_time = Caller(one, clock.now + 30, flow="a")
        await turns()
        assert one.waiting_count == 4
    await all_back([*waiting, in_time])


async def test_a_call_of_another_flow_need_not_wait_for_all_of_a_flood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, one = Clock(monkeypatch), pool()
    await practised(clock, one)
    async with one.lease(None, flow="a"):
        waiting = [Caller(one, flow="a") for _ in range(30)]
        await turns()
        single = Caller(one, clock.now + 5, flow="b")
        await turns()
        assert not single.task.done()
    await turns()
    await all_back([*waiting, single])


async def test_nobody_is_refused_on_a_rumour(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first passes of a model are slow; how long later ones take is not known yet."""
    clock, one = Clock(monkeypatch), pool()
    async with one.lease(None, flow="a"):
        clock.now += 100
    async with one.lease(None, flow="a"):
        waiting = Caller(one, clock.now + 5, flow="a")
        await turns()
        assert not waiting.task.done()
    await waiting.give_back()


async def test_a_pass_that_failed_says_nothing_about_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, one = Clock(monkeypatch), pool()
    await practised(clock, one)
    with suppress(ValueError):
        async with one.lease(None):
            clock.now += 1000
            raise ValueError("mine")
    assert one.throughput.seconds() == pytest.approx(1)


async def test_what_is_not_served_costs_nothing() -> None:
    one = pool(max_queue=50)
    async with one.lease(None, flow="a"):
        given_up = [Caller(one, flow="b") for _ in range(20)]
        await turns()
        for caller in given_up:
            caller.task.cancel()
        await asyncio.gather(*(caller.task for caller in given_up), return_exceptions=True)
        assert one._line.cost == 0
        assert dict(one._line.flows()).get("b", 0) == 0
