"""The events of a trainer's fits: numbered without gaps, watched by anybody, kept over restarts.

Numbers count over all fits of a trainer. What was told once stays as it is: a fit that goes on after a crash
does some of its work again, but tells of none of it twice, see `fitting`.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trocar_server.errors import ServiceError

LAST_KINDS = frozenset({"finished", "failed", "cancelled"})
"""What ends a fit."""
EVENTS_KEPT = 100_000
"""In memory and on disk; older ones are forgotten."""


@dataclass(frozen=True)
class NewEvent:
    """One event, before it has a number."""

    kind: str
    time_s: float
    facts: dict[str, Any]


@dataclass(frozen=True)
class LoggedEvent:
    """One event, as it is sent and stored."""

    number: int
    kind: str
    time_s: float
    facts: dict[str, Any]


class EventLog:
    """Takes events in, and yields them to watchers. Belongs to one event loop.

    A disk that fails costs no event as long as the server lives; what could not be written is written with
    the next one.

    Args:
        path: Where they are kept, one JSON object a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._events: list[LoggedEvent] = []
        self._changed = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._is_torn = False
        self._next_number = 0
        self._is_closed = False
        self._why_closed: ServiceError | None = None

    @property
    def first_number(self) -> int:
        """Of the oldest event that is kept."""
        return self._events[0].number if self._events else self._next_number

    @property
    def next_number(self) -> int:
        """Of the next event."""
        return self._next_number

    @property
    def newest_fit_number(self) -> int:
        """Of the event that began the newest fit."""
        return next((event.number for event in reversed(self._events) if event.kind == "started"), 0)

    def since(self, number: int) -> list[LoggedEvent]:
        """Return the events from one on."""
        return [event for event in self._events if event.number >= number]

    def load(self) -> None:
        """Read what is on disk, up to a torn line."""
        lines: Sequence[str] = ()
        with suppress(OSError, UnicodeDecodeError):
            lines = self._path.read_text(encoding="utf-8").splitlines()
        self._events = []
        for line in lines:
            event = _read(line)
            if event is None or (self._events and event.number != self._next_number):
                break
            self._events.append(event)
            self._next_number = event.number + 1
        self._rewrite()

    def skip_to(self, number: int) -> None:
        """Let the next event have this number at least; those that are missing before it are gone."""
        if number > self._next_number:
            self._events, self._next_number, self._is_torn = [], number, True

    async def add(self, events: Sequence[NewEvent]) -> None:
        """Take events in, in order."""
        if not events:
            return
        added = []
        for event in events:
            added.append(LoggedEvent(self._next_number, event.kind, event.time_s, event.facts))
            self._next_number += 1
        self._events += added
        async with self._writing:
            if self._is_torn or len(self._events) > 2 * EVENTS_KEPT:
                self._events = self._events[-EVENTS_KEPT:]
                await asyncio.to_thread(self._rewrite)
            else:
                await asyncio.to_thread(self._append, added)
        async with self._changed:
            self._changed.notify_all()

    async def sync(self) -> None:
        """Let what was added survive a crash of the machine, too."""
        async with self._writing:
            await asyncio.to_thread(self._sync)

    async def watch(self, number: int) -> AsyncIterator[LoggedEvent]:
        """Yield events from one on, up to and with the one that ends its fit, or until the log is closed.

        Raises:
            ServiceError: As given to `close`.
        """
        while True:
            async with self._changed:
                while self._next_number <= number and not self._is_closed:
                    await self._changed.wait()
            if self._next_number <= number:
                if self._why_closed is not None:
                    raise self._why_closed.with_traceback(None)
                return
            for event in self._events[max(number - self.first_number, 0) :]:
                yield event
                number = event.number + 1
                if event.kind in LAST_KINDS:
                    return

    async def close(self, why: ServiceError | None = None) -> None:
        """Let whoever watches go: there will be no more events."""
        self._is_closed, self._why_closed = True, why
        async with self._changed:
            self._changed.notify_all()

    def _append(self, events: Sequence[LoggedEvent]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(_written(event) for event in events)
        except OSError:
            self._is_torn = True

    def _rewrite(self) -> None:
        partial = self._path.with_suffix(".partial")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.writelines(_written(event) for event in self._events)
            partial.replace(self._path)
            self._is_torn = False
        except OSError:
            self._is_torn = True
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _sync(self) -> None:
        with suppress(OSError), self._path.open("rb") as file:
            os.fsync(file.fileno())


def _written(event: LoggedEvent) -> str:
    record = {"number": event.number, "kind": event.kind, "time_s": event.time_s, "facts": event.facts}
    return json.dumps(record) + "\n"


def _read(line: str) -> LoggedEvent | None:
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        record = json.loads(line)
        event = LoggedEvent(record["number"], record["kind"], record["time_s"], record["facts"])
        types = (type(event.number), type(event.kind), type(event.facts))
        return event if types == (int, str, dict) else None
    return None
