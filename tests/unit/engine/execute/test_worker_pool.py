"""Worker pool: whose process a cancel kills."""

import asyncio
import threading
from typing import Any

import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.decoding.process import EndedError
from trocar_server.engine.execute.worker_pool import WorkerPool
from trocar_server.errors import ServiceError


class Process:
    """Stands in for a process that starts at once."""

    pid = None

    def __init__(self) -> None:
        self.is_killed = False

    def start(self) -> None:
        pass

    def renew(self) -> None:
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True

    end = kill


def stopping() -> ServiceError:
    return ServiceError(ErrorReason.SERVER_BUSY, "it stops")


class SlowToStart(Process):
    """Stands in for a process whose libraries take long to import."""

    def __init__(self, is_able: bool = True) -> None:
        super().__init__()
        self.may_start = threading.Event()
        self._is_able = is_able

    def start(self) -> None:
        self.may_start.wait(60)
        if not self._is_able:
            raise EndedError


async def test_the_start_of_a_process_is_not_of_the_time_of_its_work() -> None:
    process: Any = SlowToStart()
    pool = WorkerPool(lambda: process, 1, 1, stopping)
    work = asyncio.create_task(pool.run(lambda _: 7, 1, "a", 0.001, is_small=True))
    done, _ = await asyncio.wait([work], timeout=0.05)  # far longer than the work may take
    assert not done
    process.may_start.set()
    assert await work == 7
    assert not process.is_killed
    pool.stop()


async def test_a_process_that_cannot_start_is_no_fault_of_the_work() -> None:
    process: Any = SlowToStart(is_able=False)
    process.may_start.set()
    pool = WorkerPool(lambda: process, 1, 1, stopping)
    with pytest.raises(ServiceError, match="could not start") as error:
        await pool.run(lambda _: 7, 1, "a", 1.0, is_small=True)
    assert error.value.reason is ErrorReason.SERVER_BUSY
    pool.stop()


async def test_a_cancel_after_the_work_kills_nothing_of_the_next_caller() -> None:
    process: Any = Process()
    pool = WorkerPool(lambda: process, 1, 1, stopping)
    has_begun, may_end = threading.Event(), threading.Event()

    def work(_: Any) -> bool:
        has_begun.set()
        return may_end.wait(60)

    first = asyncio.create_task(pool.run(work, 1, "a", None, is_small=True))
    await asyncio.to_thread(has_begun.wait, 60)
    for _ in range(3):  # the first caller waits for the end of its work
        await asyncio.sleep(0)
    second = asyncio.create_task(pool.run(lambda used: used.is_killed, 1, "b", None, is_small=True))
    give_back = pool._give_back

    def and_cancel(slot: Any) -> None:
        give_back(slot)
        first.cancel()  # the first caller has not run since its work ended

    pool._give_back = and_cancel  # type: ignore[method-assign]
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    pool._give_back = give_back  # type: ignore[method-assign]
    assert not process.is_killed
    assert await second is False
    pool.stop()
