"""Messages that wait for a caller who reads slowly, or not at all."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.engine.schedule.admission import Admission, MethodClass, with_budgets
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.replies import Parts
from trocar_server.rpc.transfer import backlog as backlogs
from trocar_server.rpc.transfer.backlog import Backlog

SIZE = 100


class Maker:
    """Makes messages, and notes how many, and whether it was closed."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.made, self.closed = 0, asyncio.Event()
        self._count, self._error = count, error

    async def messages(self) -> AsyncGenerator[list[Parts], None]:
        try:
            for number in range(self._count):
                await asyncio.sleep(0)
                self.made += 1
                yield [[bytes([number % 256]), bytes(SIZE - 1)]]
            if self._error is not None:
                raise self._error
        finally:
            self.closed.set()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


@pytest.fixture
def admission() -> Admission:
    limits = Limits(max_pending_bytes=1 << 20, max_principal_bytes=1 << 16)
    return Admission(with_budgets(limits))


async def read(messages: AsyncGenerator[list[Parts], None], numbers: list[int]) -> None:
    async for parts in messages:
        numbers.append(parts[0][0][0])


async def until_still(maker: Maker) -> None:
    """Return when the maker makes nothing more."""
    before = -1
    while maker.made != before:
        before = maker.made
        for _ in range(10):
            await asyncio.sleep(0)


def test_all_is_made_while_nobody_reads(admission: Admission) -> None:
    async def main() -> None:
        maker = Maker(50)
        with admission.admit(MethodClass.STREAM, "ann") as reservation:
            async with aclosing(Backlog(reservation).messages(maker.messages())) as messages:
                first = await anext(messages)
                await until_still(maker)
                assert maker.made == 50
                assert maker.closed.is_set()
                assert reservation.byte_count == 50 * SIZE
                numbers = [first[0][0][0], *[parts[0][0][0] async for parts in messages]]
            assert numbers == list(range(50))
            assert reservation.byte_count == 0

    run(main())


@pytest.mark.parametrize("bound", ["bytes", "budget"])
def test_a_reader_who_is_far_behind_stops_the_maker_and_then_ends_it(
    admission: Admission, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(backlogs, "PATIENCE_S", 0.05)
    most = (1 << 16) // SIZE
    if bound == "bytes":
        most = 5
        monkeypatch.setattr(backlogs, "MOST_BYTES", most * SIZE)

    async def main() -> None:
        maker = Maker(10_000)
        with admission.admit(MethodClass.STREAM, "ann") as reservation:
            numbers: list[int] = []
            async with aclosing(Backlog(reservation).messages(maker.messages())) as messages:
                numbers.append((await anext(messages))[0][0][0])
                await maker.closed.wait()
                assert reservation.byte_count == maker.made * SIZE
                assert maker.made == most + 1
                with pytest.raises(ServiceError, match="wait to be read") as raised:
                    await read(messages, numbers)
            assert raised.value.reason is ErrorReason.DEADLINE_EXCEEDED
            assert len(numbers) == maker.made  # what was made before is read
            assert reservation.byte_count == 0

    run(main())


def test_the_wait_of_each_part_is_bounded_not_that_of_each_message(
    admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlogs, "MOST_BYTES", 0)

    async def main() -> None:
        with admission.admit(MethodClass.STREAM, "ann") as reservation:
            backlog = Backlog(reservation)
            async with aclosing(backlog.messages(Maker(3).messages())) as messages:
                async for _ in messages:
                    await asyncio.sleep(0.01)
            assert backlog._left_s < backlogs.PATIENCE_S
            backlog.begin()
            assert backlog._left_s == backlogs.PATIENCE_S

    run(main())


def test_an_error_of_the_maker_comes_behind_what_it_made(admission: Admission) -> None:
    async def main() -> None:
        maker = Maker(3, ValueError("broken"))
        with admission.admit(MethodClass.STREAM, "ann") as reservation:
            numbers: list[int] = []
            with pytest.raises(ValueError, match="broken"):
                await read(Backlog(reservation).messages(maker.messages()), numbers)
            assert numbers == [0, 1, 2]

    run(main())


def test_a_caller_who_leaves_closes_the_maker(admission: Admission) -> None:
    async def main() -> None:
        maker = Maker(1_000_000)
        with admission.admit(MethodClass.STREAM, "ann") as reservation:
            async with aclosing(Backlog(reservation).messages(maker.messages())) as messages:
                await anext(messages)
            assert maker.closed.is_set()
            assert reservation.byte_count == 0

    run(main())
