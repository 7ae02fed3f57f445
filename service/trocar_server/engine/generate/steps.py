"""Steps: the passes of a text that have run, on their way to its reader.

# Note: [Passes ahead]
A pass of a small model takes some milliseconds, and a turn of the event loop between two of them a tenth of
that. So the thread that owns torch goes on with the next pass at once, as long as nobody waits for the
replica or for the thread, for `LEASE_S` at most, and while fewer than `MOST_AHEAD` passes have not been
looked at. What is done for each message costs as much again, so tokens that come within `_TOGETHER_S` of the
message before come together: nobody reads faster. The first comes alone, and at once. With stop strings each
pass waits until the one before was looked at: what tokens show may end the text.
"""

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto, unique

from trocar_server.engine.generate.decoding import DecodedPass

MOST_AHEAD = 8
"""Passes of a text that run before the first of them was looked at."""
_MOST_TOGETHER = MOST_AHEAD // 2
"""The most that come together, so that others run meanwhile."""
_TOGETHER_S = 0.05
"""Seconds from a pass that is looked at to the next, unless `_MOST_TOGETHER` have run before."""
LEASE_S = 0.1
"""Seconds after which a lease is given back, whoever waits; a longer pass is alone in its lease."""


@unique
class End(Enum):
    """Why a text ended."""

    LENGTH = auto()
    STOP_TOKEN = auto()
    STOP_STRING = auto()
    GATE = auto()


@dataclass(frozen=True)
class Step:
    """A pass that has run.

    Attributes:
        decoded: The pass.
        queue_s: Seconds that it has waited for a replica.
        end: Why the text ends behind it; None where it goes on.
        ended_at: When it had run, as a time of `time.perf_counter()` in seconds.
    """

    decoded: DecodedPass
    queue_s: float
    end: End | None
    ended_at: float


class Steps:
    """The passes that have run and were not looked at; see Note: [Passes ahead].

    For one event loop, but for `put`.

    Args:
        most: The most of them, those that run now included.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._steps: deque[Step] = deque()
        self._looked_at = 0
        """Passes that were taken and are looked at now."""
        self._is_closed = self._is_stopped = False
        self._changed, self._freed = asyncio.Event(), asyncio.Event()
        self._next_at = 0.0

    async def room(self) -> int:
        """Return how many passes may run, as soon as it is one or more; none once stopped."""
        while not self._is_stopped:
            self._freed.clear()
            if left := self._most - len(self._steps) - self._looked_at:
                return left
            await self._freed.wait()
        return 0

    def put(self, step: Step) -> None:
        """Add a pass that has run, on any thread."""
        self._steps.append(step)
        self._loop.call_soon_threadsafe(self._changed.set)

    def close(self) -> None:
        """Note that no pass follows."""
        self._is_closed = True
        self._changed.set()

    def free(self, count: int) -> None:
        """Note that passes were looked at."""
        self._looked_at -= count
        self._freed.set()

    def stop(self) -> None:
        """Let no pass begin from now on."""
        self._is_stopped = True
        self._freed.set()

    async def next(self) -> list[Step]:
        """Return the passes that are looked at next; none at the end."""
        result: list[Step] = []
        most = min(self._most, _MOST_TOGETHER)
        with suppress(TimeoutError):
            while len(result) < most and not (result and result[-1].end):
                self._changed.clear()
                if self._steps:
                    result.append(self._steps.popleft())
                    self._looked_at += 1
                    continue
                if self._is_closed:
                    break
                async with asyncio.timeout_at(self._next_at if result else None):
                    await self._changed.wait()
        self._next_at = self._loop.time() + _TOGETHER_S
        return result
