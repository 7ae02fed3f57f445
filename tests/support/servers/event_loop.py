"""Event loop on a thread, for servers and proxies under test."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_END_S = 60


@contextmanager
def event_loop(name: str) -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop on a thread; at the end, cancel what still runs and await it, as `asyncio.run` does.

    A task that is collected unfinished would fail whichever test runs at that moment.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=name)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(_cancel_others(loop), loop).result(_END_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_others(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await loop.shutdown_asyncgens()
