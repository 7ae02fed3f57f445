"""Tasks of the event loop: work in the background, and work that runs to its end once begun.

    task = begin(self._watch(variant), self._tasks)
    return await shielded(self._close(trainer))

A loop holds its tasks weakly: one that nobody else keeps may vanish before it is done.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")

_shielded: set[asyncio.Task[Any]] = set()


def begin(work: Coroutine[Any, Any, Result], tasks: set[asyncio.Task[Result]]) -> asyncio.Task[Result]:
    """Run work in a task of its own, kept in `tasks` until it is done."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def shielded(work: Coroutine[Any, Any, Result]) -> Result:
    """Run work in its own task; on cancellation, wait for it to end, then raise.

    A broken connection must not leave a half-applied change: something on disk but not in memory, or the
    other way round.
    """
    task = begin(work, _shielded)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await ended(task)
        raise


async def ended(task: asyncio.Task[Any]) -> None:
    """Wait for a task to end, however often this one is cancelled; what it returns or raises is dropped."""
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # retrieved: nothing else awaits it


async def all_done() -> None:
    """Wait for all shielded work of this event loop, before its dependencies are torn down."""
    loop = asyncio.get_running_loop()
    while tasks := [task for task in list(_shielded) if task.get_loop() is loop]:
        await asyncio.wait(tasks)
