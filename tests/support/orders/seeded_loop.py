"""An event loop that runs what is ready in an order given by a seed, and whose awaits take a moment.

    run(7, main())                        # the same seed, the same order
    with watching(Watch(at=3, act=task.cancel)):
        task = asyncio.create_task(call())     # its third await, or one of the tasks that it begins

Functions for threads run on the loop's own thread, as callbacks like all others: their ends are ordered by
the seed, too. A cancelled wait for such a function leaves it running, as a thread that has begun does. Time
is virtual: where nothing is ready, the clock jumps to the next timer, so that nothing sleeps.
"""

from __future__ import annotations

import asyncio
import selectors
import types
from collections import deque
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Iterator

Result = TypeVar("Result")

_MOMENTS = (0, 0, 0, 1, 1, 2, 5)
"""Turns of the loop that an await takes longer, one of them drawn for each."""
_EXTERNAL_S = 0.05
MOST_S = 3600.0
"""Virtual seconds after which a run counts as stuck."""


@dataclass
class Watch:
    """Counts the awaits of a task and of those that it begins, and acts at one of them.

    Attributes:
        at: The number of the await, from 1; 0 only counts.
        act: Called once, at that await.
        is_late: Whether to act when its result is there but the task has not yet gone on.
        count: Awaits so far.
    """

    at: int = 0
    act: Callable[[], object] | None = None
    is_late: bool = False
    count: int = 0

    def begins(self) -> bool:
        """Count an await; returns whether it is the one, and its act is due at its end."""
        self.count += 1
        if self.count != self.at or self.act is None:
            return False
        if not self.is_late:
            self.act()
        return self.is_late


_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watching(watch: Watch | None) -> Iterator[None]:
    """Let a watch see the tasks that are begun inside the context."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


class _AnyOrder(deque[Any]):
    """Ready callbacks, taken in an order that a generator draws."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def popleft(self) -> Any:
        if len(self) > 1:
            self.rotate(-self._random.randrange(len(self)))
        return super().popleft()


class _Clock(selectors.SelectSelector):
    """A selector that never waits for time: it notes the seconds that it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped_s = 0.0
        self.external_count = 0
        """Functions that run in threads of their own."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if self.external_count:
            return super().select(_EXTERNAL_S)
        if timeout is None or self.skipped_s > MOST_S:
            raise RuntimeError("every task waits, and nothing that could wake one is under way")
        self.skipped_s += timeout
        return []


class SeededLoop(asyncio.SelectorEventLoop):
    """The loop.

    Args:
        seed: Of the order.
    """

    def __init__(self, seed: int) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)
        self.random = Random(seed)
        self._ready = _AnyOrder(self.random)
        self.set_task_factory(_slow_task)

    def time(self) -> float:
        return super().time() + self._clock.skipped_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        if executor is not None:
            return self._external(super().run_in_executor(executor, func, *args))
        future = self.create_future()
        self.call_soon(_settle, future, func, args)
        return future

    def _external(self, future: asyncio.Future[Any]) -> asyncio.Future[Any]:
        self._clock.external_count += 1

        def ended(_: object) -> None:
            self._clock.external_count -= 1

        future.add_done_callback(ended)
        return future


def _settle(future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result = func(*args)
    except BaseException as error:  # noqa: BLE001 - handed to the task that waits
        if not future.cancelled():
            future.set_exception(error)
    else:
        if not future.cancelled():
            future.set_result(result)


def _slow_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    assert isinstance(loop, SeededLoop)
    task = asyncio.Task(_slow(coroutine, loop.random, _watch.get()), loop=loop, **options)
    task.add_done_callback(lambda _: coroutine.close())  # cancelled before it began
    return task


async def _slow(coroutine: Coroutine[Any, Any, Result], random: Random, watch: Watch | None) -> Result:
    return await _slowly(coroutine, random, watch)


@types.coroutine
def _slowly(
    coroutine: Coroutine[Any, Any, Result], random: Random, watch: Watch | None
) -> Generator[Any, Any, Result]:
    """Run a coroutine whose awaits each take some turns of the loop longer."""
    go_on: Callable[[Any], Any] = coroutine.send
    given: Any = None
    while True:
        try:
            awaited = go_on(given)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        is_due = watch is not None and watch.begins()
        try:
            given, go_on = (yield awaited), coroutine.send
            if is_due and watch is not None and watch.act is not None:
                watch.act()
            for _ in range(max(random.choice(_MOMENTS), is_due)):
                yield None
        except BaseException as error:  # noqa: BLE001 - raised within the coroutine
            given, go_on = error, coroutine.throw


def run(seed: int, main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on a loop of its own, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=lambda: SeededLoop(seed)) as runner:
        return runner.run(main)
