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


async def whole(work: Coroutine[Any, Any, Result]) -> Result:
    """Run work as a task of its own; when cancelled, wait for its end first."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # it is nobody's any more
        raise
