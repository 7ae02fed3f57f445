"""Worker pool: a few processes, shared fairly between callers. Belongs to one event loop.

One of the processes takes small work only, so that no amount of large work delays the small work of other
callers. Callers get equal shares of cost.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trocar_server.decoding.process import EndedError, WorkerProcess
from trocar_server.engine.schedule.fair_queue import FairQueue
from trocar_server.errors import ServiceError, busy

Result = TypeVar("Result")

_STARTS_WITHIN_S = 120.0
"""A process that imports libraries takes seconds, and many of them beside other work."""


@dataclass(eq=False)
class _Slot:
    """A process, and the thread that communicates with it."""

    is_for_small: bool
    process: WorkerProcess
    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="trocar-worker")
    )


async def _within(begun: asyncio.Event, seconds: float) -> None:
    """Wait until a process has started.

    Raises:
        ServiceError: `SERVER_BUSY`, it takes too long.
    """
    try:
        async with asyncio.timeout(seconds):
            await begun.wait()
    except TimeoutError:
        raise _not_started() from None


def _not_started() -> ServiceError:
    return busy("a process that prepares inputs could not start: the machine is busy; try again in a moment")


class WorkerPool:
    """Runs work in separate processes, which a cancel or a timeout kills.

        pool = WorkerPool(lambda: WorkerProcess("trocar_server.decoding.worker"), 2, 1 << 20, stopping)
        result = await pool.run(lambda process: process.ask(...), cost, flow, timeout_s, is_small=True)
        pool.stop()

    Args:
        make: Makes a process, which starts at its first work.
        count: Number of processes.
        quantum: Cost that a caller may spend in a row; see `FairQueue`.
        stopping: Makes the error of work that a stop prevents.
    """

    def __init__(
        self,
        make: Callable[[], WorkerProcess],
        count: int,
        quantum: int,
        stopping: Callable[[], ServiceError],
    ) -> None:
        self._free = [_Slot(index == 0 and count > 1, make()) for index in range(count)]
        self._slots = tuple(self._free)
        self._lines: dict[bool, FairQueue[asyncio.Future[_Slot]]] = {
            is_small: FairQueue(quantum) for is_small in (True, False)
        }
        self._stopping = stopping
        self.is_stopped = False

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that have started."""
        return [slot.process.pid for slot in self._slots if slot.process.pid and slot.process.is_ready]

    async def run(
        self,
        work: Callable[[WorkerProcess], Result],
        cost: int,
        flow: str,
        timeout_s: float | None,
        *,
        is_small: bool,
    ) -> Result:
        """Run work with a process.

        Args:
            work: Called on a thread of the process.
            cost: What is charged to the flow.
            flow: The caller's.
            timeout_s: The most seconds from the start of the work, which begins when the process has started.
            is_small: Whether it may run in the process for small work.

        Raises:
            TimeoutError: It took longer; the process is killed.
            ServiceError: The pool is stopped; `SERVER_BUSY`, the process did not start.
        """
        slot = await self._slot(cost, flow, is_small=is_small)
        loop, has_begun = asyncio.get_running_loop(), asyncio.Event()

        def started() -> Result:
            try:
                slot.process.start()
            except EndedError:
                if not slot.process.is_killed:  # then the work says so
                    raise _not_started() from None
            loop.call_soon_threadsafe(has_begun.set)
            return work(slot.process)

        running = loop.run_in_executor(slot.thread, started)
        running.add_done_callback(lambda done: self._finished(slot, done))
        running.add_done_callback(lambda _: has_begun.set())
        try:
            await _within(has_begun, _STARTS_WITHIN_S)
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(running)
        except (TimeoutError, ServiceError, asyncio.CancelledError):
            if not running.done():  # else it was handed on already
                slot.process.kill()
            raise

    def stop(self) -> None:
        """Kill every process; pending work fails, and none is accepted afterwards."""
        if self.is_stopped:
            return
        self.is_stopped = True
        for line in self._lines.values():
            while line:
                turn = line.pop()
                if not turn.done():
                    turn.set_exception(self._stopping())
        for slot in self._slots:
            slot.process.kill()
            slot.thread.submit(slot.process.end)
            slot.thread.shutdown(wait=False)

    async def _slot(self, cost: int, flow: str, *, is_small: bool) -> _Slot:
        """Wait for a process that takes work of this size."""
        if self.is_stopped:
            raise self._stopping()
        fitting = [slot for slot in self._free if is_small or not slot.is_for_small]
        if fitting:
            # Of those that fit, the last used: its process is running.
            slot = fitting[-1]
            self._free.remove(slot)
        else:
            slot = await self._turn(cost, flow, is_small=is_small)
        slot.process.renew()
        return slot

    async def _turn(self, cost: int, flow: str, *, is_small: bool) -> _Slot:
        turn: asyncio.Future[_Slot] = asyncio.get_running_loop().create_future()
        line = self._lines[is_small]
        ticket = line.push(turn, flow, cost)
        try:
            return await turn
        except BaseException:
            if not line.remove(ticket) and turn.done() and not turn.cancelled() and not turn.exception():
                self._give_back(turn.result())
            raise

    def _finished(self, slot: _Slot, work: "asyncio.Future[Any]") -> None:
        if not work.cancelled():
            work.exception()  # marks it as retrieved: its caller may be gone
        self._give_back(slot)

    def _give_back(self, slot: _Slot) -> None:
        """Hand a process on: large work first, as small work has a dedicated process."""
        lines = [self._lines[True]] if slot.is_for_small else [self._lines[False], self._lines[True]]
        for line in lines:
            while line:
                turn = line.pop()
                if not turn.done():
                    turn.set_result(slot)
                    return
            line.forget()
        self._free.append(slot)
