"""Shielded work: runs to its end once begun, even if its caller is cancelled.

    return await shielded(self._close(trainer))

A broken connection must not leave a half-applied change: something on disk but not in memory, or the other
way round.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")

_running: set[asyncio.Task[Any]] = set()


async def shielded(work: Coroutine[Any, Any, Result]) -> Result:
    """Run work in its own task; on cancellation, wait for it to end, then raise."""
    task = asyncio.create_task(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # retrieved: nothing else awaits it
        raise


async def all_done() -> None:
    """Wait for all shielded work of this event loop, before its dependencies are torn down."""
    loop = asyncio.get_running_loop()
    while tasks := [task for task in list(_running) if task.get_loop() is loop]:
        await asyncio.wait(tasks)
