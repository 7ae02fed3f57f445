"""Steps: how far passes run ahead, and which of them are looked at together."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.support.orders.seeded_loop import run
from trocar_server.engine.generate.decoding import DecodedPass
from trocar_server.engine.generate.sampling import Choice
from trocar_server.engine.generate.steps import MOST_AHEAD, End, Step, Steps


def step(number: int, end: End | None = None) -> Step:
    decoded = DecodedPass(number, 1, Choice(number, 0.0), (), {}, {}, 0.0, None)
    return Step(decoded, 0.0, end, 0.0)


def numbers(steps: list[Step]) -> list[int]:
    return [each.decoded.first_position for each in steps]


def virtual(work: Coroutine[Any, Any, None]) -> None:
    """Run it on a clock that does not wait."""
    run(0, work)


def test_the_first_pass_is_looked_at_at_once_and_later_ones_together() -> None:
    async def work() -> None:
        steps = Steps(MOST_AHEAD)
        steps.put(step(0))
        assert numbers(await steps.next()) == [0]
        steps.free(1)
        loop, began_at = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        for number in range(1, 4):
            loop.call_later(0.02 * number, steps.put, step(number))
        assert numbers(await steps.next()) == [1, 2]
        assert loop.time() - began_at == pytest.approx(0.05, abs=0.01)
        assert numbers(await steps.next()) == [3]

    virtual(work())


def test_passes_that_came_before_are_looked_at_without_a_wait() -> None:
    async def work() -> None:
        steps = Steps(MOST_AHEAD)
        for number in range(7):
            steps.put(step(number))
        began_at = asyncio.get_running_loop().time()
        assert numbers(await steps.next()) == [0, 1, 2, 3]
        assert asyncio.get_running_loop().time() - began_at < 0.01

    virtual(work())


def test_as_many_run_as_were_not_looked_at() -> None:
    async def work() -> None:
        steps = Steps(3)
        assert await steps.room() == 3
        for number in range(3):
            steps.put(step(number))
        waiting = asyncio.ensure_future(steps.room())
        taken = await steps.next()
        assert not waiting.done()
        steps.free(len(taken))
        assert await waiting == len(taken)

    virtual(work())


@pytest.mark.parametrize("has_end", [True, False])
def test_the_end_comes_behind_all_passes(has_end: bool) -> None:
    async def work() -> None:
        steps = Steps(MOST_AHEAD)
        steps.put(step(0))
        steps.put(step(1, End.LENGTH if has_end else None))
        steps.close()
        seen: list[int] = []
        while together := await steps.next():
            seen += numbers(together)
        assert seen == [0, 1]

    virtual(work())


def test_nothing_begins_once_stopped() -> None:
    async def work() -> None:
        steps = Steps(1)
        steps.put(step(0))
        waiting = asyncio.ensure_future(steps.room())
        await asyncio.sleep(1)
        steps.stop()
        assert await waiting == 0
        assert await steps.room() == 0

    virtual(work())
