"""Event log of a trainer's fits: numbered without gaps, watchable, durable.

Numbers continue over all fits of a trainer. Logged events never change: a fit that resumes after a crash
repeats some of its work, but logs none of it twice, see `fitting`. So an event is shown once it is written:
the number of one that a killed server had shown and not written would be given to another event.
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
from trocar_server.storage.durable import write_durably
from trocar_server.tasks import shielded

LAST_KINDS = frozenset({"finished", "failed", "cancelled"})
"""Kinds of events that end a fit."""
EVENTS_KEPT = 100_000
"""The most events in memory and on disk; older ones are dropped."""


@dataclass(frozen=True)
class NewEvent:
    """One event, before it has a number."""

    kind: str
    time_s: float
    facts: dict[str, Any]


@dataclass(frozen=True)
class LoggedEvent:
    """One event, as sent and stored."""

    number: int
    kind: str
    time_s: float
    facts: dict[str, Any]


class EventLog:
    """Stores events, and yields them to watchers. Belongs to one event loop.

    A failing disk loses no event while the server runs; events that could not be written are written with the
    next one.

    Args:
        path: Path of the log, one JSON object per line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._events: list[LoggedEvent] = []
        self._changed = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._is_torn = False
        self._next_number = 0
        self._next_to_write = 0
        self._next_to_show = 0
        self._is_closed = False
        self._why_closed: ServiceError | None = None

    @property
    def first_number(self) -> int:
        """Number of the oldest event that is kept."""
        return self._events[0].number if self._events else self._next_number

    @property
    def next_number(self) -> int:
        """Number of the next event."""
        return self._next_number

    @property
    def newest_fit_number(self) -> int:
        """Number of the event that began the newest fit."""
        return next((event.number for event in reversed(self._events) if event.kind == "started"), 0)

    def since(self, number: int) -> list[LoggedEvent]:
        """Return the events from a number on."""
        return [event for event in self._events if event.number >= number]

    def load(self) -> None:
        """Read the log from disk, up to a torn line.

        Raises:
            OSError: It exists and cannot be read now; it is left as it is.
        """
        lines: Sequence[bytes] = ()
        with suppress(FileNotFoundError):
            lines = self._path.read_bytes().splitlines()
        self._events = []
        for line in lines:
            event = _read(line)
            if event is None or (self._events and event.number != self._next_number):
                break
            self._events.append(event)
            self._next_number = self._next_to_show = event.number + 1
        self._rewrite()

    def skip_to(self, number: int) -> None:
        """Set the minimum number of the next event; missing ones before it are lost."""
        if number > self._next_number:
            self._events, self._next_number, self._is_torn = [], number, True

    async def add(self, events: Sequence[NewEvent]) -> None:
        """Append events, in order."""
        if not events:
            return
        for event in events:
            self._events.append(LoggedEvent(self._next_number, event.kind, event.time_s, event.facts))
            self._next_number += 1
        own_end = self._next_number
        async with self._writing:  # until its thread has ended, so that the next one knows what was written
            if self._is_torn or len(self._events) > 2 * EVENTS_KEPT:
                self._events = self._events[-EVENTS_KEPT:]
                await shielded(asyncio.to_thread(self._rewrite))
            else:
                await shielded(asyncio.to_thread(self._append))
            self._next_to_show = own_end  # on a failing disk, too: it is written with the next one
        async with self._changed:
            self._changed.notify_all()

    async def sync(self) -> None:
        """Flush added events to disk, so that they survive a crash of the machine, too."""
        async with self._writing:
            await asyncio.to_thread(self._sync)

    async def watch(self, number: int) -> AsyncIterator[LoggedEvent]:
        """Yield events from a number on, up to the one that ends its fit, or until the log is closed.

        Args:
            number: Of the first event; events that are not kept any more, or never were, are left out.

        Raises:
            ServiceError: As given to `close`.
        """
        while True:
            async with self._changed:
                # At least the first number that is kept: below it a round would neither wait nor yield.
                while (
                    self._next_to_show <= (number := max(number, self.first_number)) and not self._is_closed
                ):
                    await self._changed.wait()
            if self._next_to_show <= number:
                if self._why_closed is not None:
                    raise self._why_closed.with_traceback(None)
                return
            shown = slice(number - self.first_number, self._next_to_show - self.first_number)
            for event in self._events[shown]:
                yield event
                number = event.number + 1
                if event.kind in LAST_KINDS:
                    return

    async def close(self, why: ServiceError | None = None) -> None:
        """End all watches: no more events follow."""
        self._is_closed, self._why_closed = True, why
        async with self._changed:
            self._changed.notify_all()

    def _append(self) -> None:
        """Flush pending events. A concurrent call may already have flushed them."""
        events = self._events[max(self._next_to_write - self.first_number, 0) :]
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(map(_written, events))
        except OSError:
            self._is_torn = True
        else:
            self._note_written(events)

    def _rewrite(self) -> None:
        events = self._events.copy()  # others add to the list meanwhile
        try:
            write_durably(self._path, "".join(map(_written, events)).encode())
        except OSError:
            self._is_torn = True
        else:
            self._is_torn = False
            self._note_written(events)

    def _note_written(self, events: Sequence[LoggedEvent]) -> None:
        if events:
            self._next_to_write = events[-1].number + 1

    def _sync(self) -> None:
        with suppress(OSError), self._path.open("rb") as file:
            os.fsync(file.fileno())


def _written(event: LoggedEvent) -> str:
    record = {"number": event.number, "kind": event.kind, "time_s": event.time_s, "facts": event.facts}
    return json.dumps(record) + "\n"


def _read(line: bytes) -> LoggedEvent | None:
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        record = json.loads(line.decode())
        event = LoggedEvent(record["number"], record["kind"], record["time_s"], record["facts"])
        types = (type(event.number), type(event.kind), type(event.facts))
        return event if types == (int, str, dict) else None
    return None
