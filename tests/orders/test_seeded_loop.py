"""The loop itself: orders really differ, one seed is one order, and a planted race is found."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.orders.seeded_loop import Watch, run, watching


async def letters() -> str:
    said: list[str] = []

    async def say(letter: str) -> None:
        for _ in range(3):
            await asyncio.to_thread(lambda: None)
            said.append(letter)

    await asyncio.gather(*map(say, "abc"))
    return "".join(said)


def test_orders_differ_and_a_seed_is_one_order() -> None:
    orders = [run(seed, letters()) for seed in range(20)]
    assert len(set(orders)) > 15
    assert orders == [run(seed, letters()) for seed in range(20)]
    assert all(sorted(order) == sorted("abc" * 3) for order in orders)


class Counter:
    """A counter whose value may be lost between the read and the write."""

    def __init__(self) -> None:
        self.value = 0

    async def add(self) -> None:
        before = self.value
        await asyncio.sleep(0)
        self.value = before + 1


class Handover:
    """Hands over a value; it is lost if the receiver is cancelled when it is already assigned."""

    def __init__(self) -> None:
        self.free = ["replica"]

    async def use(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(turn.set_result, self.free.pop())
        self.free.append(await turn)


def test_a_planted_race_is_found() -> None:
    async def two() -> int:
        counter = Counter()
        first = asyncio.create_task(counter.add())
        await asyncio.sleep(0)  # on an ordinary loop the first is done before the second begins
        await asyncio.sleep(0)
        await asyncio.gather(first, counter.add())
        return counter.value

    assert asyncio.run(two()) == 2
    assert {run(seed, two()) for seed in range(50)} == {1, 2}


def test_a_planted_loss_is_found_by_a_late_cancellation() -> None:
    async def cancelled() -> list[str]:
        handover = Handover()
        watch = Watch(1, is_late=True)
        with watching(watch):
            task = asyncio.create_task(handover.use())
        watch.act = task.cancel
        await asyncio.wait([task])
        assert task.cancelled()
        return handover.free

    assert run(0, cancelled()) == []


def test_a_watch_counts_the_awaits_of_a_task_and_of_those_that_it_begins() -> None:
    async def counted() -> int:
        watch = Watch()
        with watching(watch):
            task = asyncio.create_task(outer())
        await task
        await asyncio.create_task(asyncio.sleep(0))  # another's
        return watch.count

    async def outer() -> None:
        await asyncio.sleep(0)
        await asyncio.create_task(asyncio.sleep(0))

    assert {run(seed, counted()) for seed in range(10)} == {3}


def test_nothing_sleeps() -> None:
    began = time.monotonic()

    async def slow() -> float:
        before = asyncio.get_running_loop().time()
        await asyncio.sleep(1000)
        return asyncio.get_running_loop().time() - before

    assert run(0, slow()) >= 1000
    assert time.monotonic() - began < 100


def test_a_wait_without_an_end_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="every task waits"):
        run(0, asyncio.Event().wait())
