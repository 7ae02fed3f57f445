"""Prefetch: one stage of a pipeline runs while the next one processes the previous item."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def prefetch(source: AsyncGenerator[Item, None], depth: int = 1) -> AsyncGenerator[Item, None]:
    """Yield the items of `source`, in order, while a separate task works on the next ones.

    async with aclosing(prefetch(decode(receive()))) as batches:
        async for batch in batches: ...

    Args:
        source: Closed when this ends, also by an error.
        depth: The most items that wait here, any number if 0; one more may be in progress in the source.
    """
    queue: asyncio.Queue[tuple[Item | None, BaseException | None]] = asyncio.Queue(depth)
    task = asyncio.create_task(_fill(source, queue))
    try:
        while True:
            item, end = await queue.get()
            if end is not None:
                break
            yield item  # type: ignore[misc]  # an item of the source, None included
            del item  # otherwise it stays alive during the wait for the next
        if not isinstance(end, StopAsyncIteration):
            raise end
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _fill(
    source: AsyncGenerator[Item, None], queue: "asyncio.Queue[tuple[Item | None, BaseException | None]]"
) -> None:
    async with aclosing(source):
        try:
            async for item in source:
                await queue.put((item, None))
                del item
            end: BaseException = StopAsyncIteration()
        except Exception as error:  # noqa: BLE001 - handed to the consumer
            end = error
    await queue.put((None, end))
