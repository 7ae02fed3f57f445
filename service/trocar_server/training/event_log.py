"""The events of a trainer's fits: numbered without gaps, watched by anybody, kept over restarts.

Numbers count over all fits of a trainer. A fit that goes on after a crash tells again what it told after its
last checkpoint, with the same numbers: so what is in the file from there on is cut off.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAST_KINDS = frozenset({"finished", "failed", "cancelled"})
"""What ends a fit."""
EVENTS_KEPT = 100_000
"""In memory and on disk; older ones are forgotten."""


@dataclass(frozen=True)
class LoggedEvent:
    """One event, as it is sent and stored."""

    number: int
    kind: str
    time_s: float
    facts: dict[str, Any]


class EventLog:
    """Takes events in, and yields them to watchers. Belongs to one event loop.

    Args:
        path: Where they are kept, one JSON object a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._events: list[LoggedEvent] = []
        self._changed = asyncio.Condition()

    @property
    def first_number(self) -> int:
        """Of the oldest event that is kept."""
        return self._events[0].number if self._events else 0

    @property
    def next_number(self) -> int:
        """Of the next event."""
        return self._events[-1].number + 1 if self._events else 0

    @property
    def newest_fit_number(self) -> int:
        """Of the event that began the newest fit."""
        return next((event.number for event in reversed(self._events) if event.kind == "started"), 0)

    def load(self, before: int | None = None) -> None:
        """Read what is on disk, up to a torn line.

        Args:
            before: Events from this number on are cut off.
        """
        lines: Sequence[str] = ()
        with suppress(OSError, UnicodeDecodeError):
            lines = self._path.read_text(encoding="utf-8").splitlines()
        self._events = []
        for line in lines:
            event = _read(line)
            if event is None or (self._events and event.number != self.next_number):
                break
            self._events.append(event)
        if before is not None:
            self._events = [event for event in self._events if event.number < before]
        self._rewrite()

    async def add(self, events: Sequence[LoggedEvent]) -> None:
        """Take events in, in order."""
        if not events:
            return
        self._events += events
        if len(self._events) > 2 * EVENTS_KEPT:
            self._events = self._events[-EVENTS_KEPT:]
            await asyncio.to_thread(self._rewrite)
        else:
            await asyncio.to_thread(self._append, events)
        async with self._changed:
            self._changed.notify_all()

    async def watch(self, number: int) -> AsyncIterator[LoggedEvent]:
        """Yield events from one on, up to and with the one that ends its fit."""
        while True:
            async with self._changed:
                while self.next_number <= number:
                    await self._changed.wait()
            start = max(number - self.first_number, 0)
            for event in self._events[start:]:
                yield event
                number = event.number + 1
                if event.kind in LAST_KINDS:
                    return

    def _append(self, events: Sequence[LoggedEvent]) -> None:
        with suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.writelines(_written(event) for event in events)

    def _rewrite(self) -> None:
        partial = self._path.with_suffix(".partial")
        with suppress(OSError):
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.writelines(_written(event) for event in self._events)
            partial.replace(self._path)


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
