"""Part of the sync client: generated from _aio_numbering.py by tools/generate_sync.py, do not edit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trocar._concurrency import SyncCondition

if TYPE_CHECKING:
    from trocar._concurrency import SyncAsk


class Numbering:
    """Gives each call that changes a trainer its number, also where several are made at the same time.

        chosen = numbering.take(None)
        ...
        numbering.end(is_applied=True)

    After a call that failed nobody but the server knows the next number. It is asked when every other call
    has ended: one that is under way may take the number that the server would name.

    Args:
        ask: Returns the number that the server applies next.
    """

    def __init__(self, ask: SyncAsk) -> None:
        self._ask = ask
        self._changed = SyncCondition()
        self._next: int | None = None
        self._open_count = 0

    def take(self, number: int | None) -> int:
        """Return the given number, or the next one; `end` must follow."""
        with self._changed:
            chosen = number
            if chosen is None:
                chosen = self._following()
            if self._next is not None:
                self._next = max(self._next, chosen + 1)
            self._open_count += 1
            return chosen

    def end(self, *, is_applied: bool) -> None:
        """Say that a call has ended."""
        with self._changed:
            self._open_count -= 1
            if not is_applied:
                self._next = None
            self._changed.notify_all()

    def forget(self) -> None:
        """Ask the server for the next number: something else than a call has changed it."""
        self._next = None

    def _following(self) -> int:
        while self._next is None:
            if self._open_count:
                self._changed.wait()
            else:
                self._next = self._ask()
        return self._next
