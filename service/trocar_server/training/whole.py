"""Work that is done to its end once it has begun, whoever stops waiting for it.

    return await whole(self._close(trainer))

A caller whose connection breaks must not leave half of a change behind: something on disk that is nowhere in
memory, or the other way round.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")

_running: set[asyncio.Task[Any]] = set()


async def whole(work: Coroutine[Any, Any, Result]) -> Result:
    """Run work as a task of its own; when cancelled, wait for its end first."""
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
            task.exception()  # it is nobody's any more
        raise


async def all_done() -> None:
    """Wait for the end of all such work of this event loop, before what it needs is taken down."""
    loop = asyncio.get_running_loop()
    while tasks := [task for task in list(_running) if task.get_loop() is loop]:
        await asyncio.wait(tasks)
