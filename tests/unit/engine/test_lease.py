"""Who gets a replica, when, and who is told to come again."""

import asyncio
import random
import time

import pytest
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.engine.lease import Replica, ReplicaPool
from trocar_server.errors import ServiceError


def pool(replica_count: int = 1, max_queue: int = 64) -> ReplicaPool:
    return ReplicaPool([Replica(nn.Identity()) for _ in range(replica_count)], max_queue)


async def turns(count: int = 10) -> None:
    """Let the event loop run everything that is ready."""
    for _ in range(count):
        await asyncio.sleep(0)


class Caller:
    """A task that asks for a replica and keeps it until it is told to give it back."""

    def __init__(self, of: ReplicaPool, deadline: float | None = None) -> None:
        self._pool, self._deadline = of, deadline
        self._done = asyncio.Event()
        self.replica: Replica | None = None
        self.task = asyncio.ensure_future(self._call())

    async def _call(self) -> None:
        async with self._pool.lease(self._deadline) as self.replica:
            await self._done.wait()

    async def give_back(self) -> None:
        self._done.set()
        await self.task


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
    assert "2 calls wait" in caught.value.message
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
