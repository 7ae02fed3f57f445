"""Numbered calls are applied once, in order."""

import asyncio

import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.numbering import MOST_AHEAD, RESULTS_KEPT, Numbering


class Counter:
    """Applies calls, and keeps the order."""

    def __init__(self) -> None:
        self.numbering: Numbering[str] = Numbering()
        self.applied: list[int] = []

    async def call(self, number: int | None, kind: str = "step", error: BaseException | None = None) -> str:
        async with self.numbering.turn(number, kind) as turn:
            if turn.result is None:
                await asyncio.sleep(0)
                if error is not None:
                    raise error
                self.applied.append(turn.number)
                turn.finish(f"result {turn.number}")
        assert turn.result is not None
        return turn.result


async def test_calls_that_come_in_any_order_are_applied_in_theirs() -> None:
    counter = Counter()
    results = await asyncio.gather(*(counter.call(number) for number in (3, 1, 0, 2, 4)))
    assert counter.applied == [0, 1, 2, 3, 4]
    assert results == ["result 3", "result 1", "result 0", "result 2", "result 4"]


async def test_a_call_that_comes_again_is_answered_and_not_applied() -> None:
    counter = Counter()
    assert await counter.call(0) == await counter.call(0) == "result 0"
    assert counter.applied == [0]


async def test_two_that_come_at_the_same_time_with_one_number_are_applied_once() -> None:
    counter = Counter()
    found = [*await asyncio.gather(counter.call(0), counter.call(0))]
    assert found == ["result 0"] * 2
    assert counter.applied == [0]


async def test_without_numbers_every_call_is_the_next() -> None:
    counter = Counter()
    await asyncio.gather(*(counter.call(None) for _ in range(5)))
    assert counter.applied == [0, 1, 2, 3, 4]


async def test_a_call_that_fails_may_come_again_and_those_behind_it_fail_at_once() -> None:
    counter = Counter()
    first = asyncio.create_task(counter.call(0, error=ValueError("not finite")))
    later = [asyncio.create_task(counter.call(number)) for number in (1, 2)]
    found = await asyncio.gather(first, *later, return_exceptions=True)
    assert isinstance(found[0], ValueError)
    for error in found[1:]:
        assert isinstance(error, ServiceError)
        assert error.reason is ErrorReason.STEP_OUT_OF_ORDER
        assert error.details["next_number"] == "0"
    assert await counter.call(0) == "result 0"


async def test_what_was_another_call_is_refused() -> None:
    counter = Counter()
    await counter.call(0, "a step")
    with pytest.raises(ServiceError, match="it was applied as a step"):
        await counter.call(0, "an optimizer step")


async def test_numbers_too_far_ahead_or_long_gone_are_refused() -> None:
    counter = Counter()
    with pytest.raises(ServiceError, match="the next one is 0"):
        await counter.call(MOST_AHEAD + 1)
    for number in range(RESULTS_KEPT + 1):
        await counter.call(number)
    with pytest.raises(ServiceError, match="no longer stored"):
        await counter.call(0)
    assert await counter.call(1) == "result 1"


async def test_one_that_gives_up_waiting_leaves_no_trace() -> None:
    counter = Counter()
    waiting = asyncio.create_task(counter.call(1))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await counter.call(0)
    assert await counter.call(1) == "result 1"
    assert counter.applied == [0, 1]


async def test_an_unnumbered_call_that_takes_the_place_is_noticed() -> None:
    counter = Counter()
    waiting = asyncio.create_task(counter.call(1))
    await asyncio.sleep(0)
    await asyncio.gather(counter.call(None), counter.call(None))
    with pytest.raises(ServiceError, match="replaced it"):
        await waiting


async def test_after_a_restore_numbers_go_on_from_there() -> None:
    counter = Counter()
    for number in range(5):
        await counter.call(number)
    counter.numbering.begin_at(2)
    assert await counter.call(2) == "result 2"
    assert counter.applied == [0, 1, 2, 3, 4, 2]


async def test_one_that_is_cancelled_when_it_was_applied_counts() -> None:
    counter = Counter()

    async def late() -> None:
        async with counter.numbering.turn(0, "step") as turn:
            turn.finish("result 0")
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await late()
    assert await counter.call(0) == "result 0"
    assert counter.applied == []


async def test_those_behind_a_cancelled_call_wait_for_it_to_come_again() -> None:
    counter = Counter()
    behind = asyncio.create_task(counter.call(1))
    await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await counter.call(0, error=asyncio.CancelledError())
    await asyncio.gather(behind, counter.call(0))
    assert counter.applied == [0, 1]


async def test_they_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trocar_server.training.numbering.AGAIN_WITHIN_S", 0)
    counter = Counter()
    behind = asyncio.create_task(counter.call(1))
    await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await counter.call(0, error=asyncio.CancelledError())
    with pytest.raises(ServiceError, match="the call before it, "):
        await behind


async def test_one_that_came_again_and_still_runs_keeps_those_behind_it_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trocar_server.training.numbering.AGAIN_WITHIN_S", 0)
    counter = Counter()
    behind = asyncio.create_task(counter.call(1))
    await asyncio.sleep(0)
    first = asyncio.create_task(counter.call(0, error=asyncio.CancelledError()))
    await asyncio.sleep(0)
    async with counter.numbering.turn(0, "step") as again:
        with pytest.raises(asyncio.CancelledError):
            await first
        await turns_of_the_loop(10)
        assert not behind.done()
        again.finish("result 0")
    assert await behind == "result 1"


async def test_one_that_is_cancelled_behind_others_does_not_leave_its_followers_hanging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for its turn: for calls at rest, as during an export, or for the call before it."""
    monkeypatch.setattr("trocar_server.training.numbering.AGAIN_WITHIN_S", 0)
    for number in (0, 1):
        counter = Counter()
        async with counter.numbering.at_rest():
            calls = [asyncio.create_task(counter.call(each)) for each in range(number + 2)]
            await turns_of_the_loop(3)
            calls[number].cancel()
            await turns_of_the_loop(3)
        *_, last = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(last, ServiceError)
        assert counter.applied == list(range(number))


async def turns_of_the_loop(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_one_that_comes_again_while_it_waits_is_applied_once() -> None:
    counter = Counter()
    waiting = [asyncio.create_task(counter.call(1)) for _ in range(2)]
    await asyncio.sleep(0)
    await counter.call(0)
    assert await asyncio.gather(*waiting) == ["result 1"] * 2
    assert counter.applied == [0, 1]


async def test_a_restore_ends_the_wait_of_what_is_over() -> None:
    counter = Counter()
    waiting = [asyncio.create_task(counter.call(number)) for number in (2, 9)]
    await asyncio.sleep(0)
    counter.numbering.begin_at(5)
    for call in waiting:
        with pytest.raises(ServiceError):
            await call
