"""Worker pool: whose process a cancel kills."""

import asyncio
import threading
from typing import Any

import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.worker_pool import WorkerPool
from trocar_server.errors import ServiceError


class Process:
    """Stands in for a process that starts at once."""

    pid = None

    def __init__(self) -> None:
        self.is_killed = False

    def renew(self) -> None:
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True

    end = kill


def stopping() -> ServiceError:
    return ServiceError(ErrorReason.SERVER_BUSY, "it stops")


async def test_a_cancel_after_the_work_kills_nothing_of_the_next_caller() -> None:
    process: Any = Process()
    pool = WorkerPool(lambda: process, 1, 1, stopping)
    may_end = threading.Event()
    first = asyncio.create_task(pool.run(lambda _: may_end.wait(60), 1, "a", None, is_small=True))
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
