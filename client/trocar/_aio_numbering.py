"""Numbers of a trainer's calls, with asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trocar._concurrency import AsyncCondition

if TYPE_CHECKING:
    from trocar._concurrency import AsyncAsk


class AsyncNumbering:
    """Gives each call that changes a trainer its number, also where several are made at the same time.

        chosen = await numbering.take(None)
        ...
        await numbering.end(is_applied=True)

    After a call that failed nobody but the server knows the next number. It is asked when every other call
    has ended: one that is under way may take the number that the server would name.

    Args:
        ask: Returns the number that the server applies next.
    """

    def __init__(self, ask: AsyncAsk) -> None:
        self._ask = ask
        self._changed = AsyncCondition()
        self._next: int | None = None
        self._open_count = 0

    async def take(self, number: int | None) -> int:
        """Return the given number, or the next one; `end` must follow."""
        async with self._changed:
            chosen = number
            if chosen is None:
                chosen = await self._following()
            if self._next is not None:
                self._next = max(self._next, chosen + 1)
            self._open_count += 1
            return chosen

    async def end(self, *, is_applied: bool) -> None:
        """Say that a call has ended."""
        async with self._changed:
            self._open_count -= 1
            if not is_applied:
                self._next = None
            self._changed.notify_all()

    def forget(self) -> None:
        """Ask the server for the next number: something else than a call has changed it."""
        self._next = None

    async def _following(self) -> int:
        while self._next is None:
            if self._open_count:
                await self._changed.wait()
            else:
                self._next = await self._ask()
        return self._next
