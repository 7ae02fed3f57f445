"""Concurrency primitives of both clients: each name once for asyncio and once for threads."""

import asyncio
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Generic, ParamSpec, Protocol, TypeAlias, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

AsyncCondition: TypeAlias = asyncio.Condition
Condition: TypeAlias = threading.Condition
AsyncLock: TypeAlias = asyncio.Lock
Lock: TypeAlias = threading.Lock

AsyncAsk: TypeAlias = Callable[[float | None], Awaitable[int]]
Ask: TypeAlias = Callable[[float | None], int]

async_pause = asyncio.sleep
pause = time.sleep

async_compute = asyncio.to_thread
"""Calls a function that computes for long, outside of the event loop's thread."""


def compute(
    function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Call a function."""
    return function(*args, **kwargs)


class AsyncItems(Generic[Item]):
    """The items of an iterable, plain or asynchronous, one by one."""

    def __init__(self, items: AsyncIterable[Item] | Iterable[Item]) -> None:
        self._plain: Iterator[Item] | None = None
        self._other: AsyncIterator[Item] | None = None
        if isinstance(items, AsyncIterable):
            self._other = aiter(items)
        else:
            self._plain = iter(items)

    async def next(self) -> Item:
        """Return the next item.

        Raises:
            StopAsyncIteration: There is none.
        """
        if self._other is not None:
            return await anext(self._other)
        assert self._plain is not None  # one of the two is always there
        for item in self._plain:
            return item
        raise StopAsyncIteration


class Items(Generic[Item]):
    """The items of an iterable, one by one."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)

    def next(self) -> Item:
        """Return the next item.

        Raises:
            StopIteration: There is none.
        """
        return next(self._items)


class _Run(Protocol):
    @property
    def is_finished(self) -> bool: ...

    def finish(self) -> object: ...


def async_completed(run: _Run) -> None:
    """Refuse what is known at the end of a run before that.

    Raises:
        RuntimeError: The run is under way.
    """
    if not run.is_finished:
        raise RuntimeError("the run is under way; iterate over it to its end first, or await run.finish()")


def completed(run: _Run) -> None:
    """Read a run to its end, for what is known then."""
    if not run.is_finished:
        run.finish()
