"""Numbered calls of one trainer: each is applied once, in order, however often it is sent.

async with numbering.turn(number) as turn:
    if turn.result is None:
        turn.finish(await apply())
return turn.result
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

Result = TypeVar("Result")

RESULTS_KEPT = 64
"""Results of calls that are returned again to whoever repeats them."""
MOST_AHEAD = 64
"""How far a call may come before its turn."""
AGAIN_WITHIN_S = 10.0
"""How long those behind a cancelled call wait for it to come again."""


@dataclass
class Turn(Generic[Result]):
    """One call, while it has the trainer for itself.

    Attributes:
        number: Of the call.
        kind: What it does.
        result: What it came to; None when it has to be applied yet.
    """

    number: int
    kind: str
    result: Result | None = None
    is_new: bool = False

    def finish(self, result: Result) -> None:
        """Say what the call came to: from now on it counts as applied."""
        self.result, self.is_new = result, True


@dataclass
class Numbering(Generic[Result]):
    """Lets one call at a time have its turn. Belongs to one event loop.

    Attributes:
        next_number: Of the call that is applied next.
    """

    next_number: int = 0
    _kept: "OrderedDict[int, tuple[str, Result | None]]" = field(default_factory=OrderedDict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: "dict[int, list[asyncio.Future[None]]]" = field(default_factory=dict)

    @asynccontextmanager
    async def turn(self, number: int | None, kind: str) -> AsyncIterator[Turn[Result]]:
        """Wait for a call's turn; see the module.

        A call that is cancelled behind `Turn.finish` counts as applied: sent again, it gets its result.

        Args:
            number: Of the call; the next one when None.
            kind: What it does.

        Raises:
            ServiceError: `STEP_OUT_OF_ORDER`, it is too old or too far ahead, was another call, or the one
                before it failed.
        """
        if number is not None and number > self.next_number:
            await self._wait(number)
        async with self._lock:
            turn: Turn[Result] = Turn(self.next_number if number is None else number, kind)
            if turn.number > self.next_number:  # a restore has come between
                raise self._out_of_order(turn.number, f"the next one is {self.next_number}")
            if turn.number < self.next_number:
                turn.result = self._known(turn.number, kind)
            try:
                yield turn
            except asyncio.CancelledError:
                if not turn.is_new:
                    self._expect_again(turn.number)
                raise
            except BaseException:
                if not turn.is_new:
                    self._fail_waiting(turn.number)
                raise
            finally:
                if turn.is_new and turn.result is not None:
                    self._applied(turn, is_numbered=number is not None)

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """Keep calls away for a moment."""
        async with self._lock:
            yield

    def begin_at(self, number: int) -> None:
        """Go on with another number, after a restore; what was applied before is forgotten."""
        self.next_number = number
        self._kept.clear()
        for earlier in [waiting for waiting in self._waiting if waiting <= number]:
            self._wake(earlier)
        self._fail_waiting(number, "the trainer was restored to another number")

    async def _wait(self, number: int) -> None:
        if number - self.next_number > MOST_AHEAD:
            raise self._out_of_order(number, f"the next one is {self.next_number}")
        turn = asyncio.get_running_loop().create_future()
        turns = self._waiting.setdefault(number, [])  # several, where a connection broke and it came again
        turns.append(turn)
        try:
            await turn
        finally:
            turns.remove(turn)
            if not turns and self._waiting.get(number) is turns:
                del self._waiting[number]

    def _known(self, number: int, kind: str) -> Result:
        found = self._kept.get(number)
        if found is None:
            raise self._out_of_order(
                number, f"the next one is {self.next_number}, and it is not kept any more"
            )
        if found[1] is None:
            raise self._out_of_order(number, "an unnumbered call took its place")
        if found[0] != kind:
            raise self._out_of_order(
                number, f"it was applied as {found[0]}; the next one is {self.next_number}"
            )
        return found[1]

    def _applied(self, turn: Turn[Result], *, is_numbered: bool) -> None:
        self._kept[turn.number] = (turn.kind, turn.result if is_numbered else None)
        if len(self._kept) > RESULTS_KEPT:
            self._kept.popitem(last=False)
        self.next_number = turn.number + 1
        self._wake(self.next_number)

    def _wake(self, number: int) -> None:
        for turn in self._waiting.get(number, ()):
            if not turn.done():
                turn.set_result(None)

    def _expect_again(self, number: int) -> None:
        """Let those that wait go on waiting for a while: a broken connection's call is sent again."""

        def give_up() -> None:
            if self.next_number == number:
                self._fail_waiting(number)

        asyncio.get_running_loop().call_later(AGAIN_WITHIN_S, give_up)

    def _fail_waiting(self, number: int, why: str = "") -> None:
        for later, turns in self._waiting.items():
            for turn in turns:
                if later > number and not turn.done():
                    turn.set_exception(self._out_of_order(later, why or f"call {number}, before it, failed"))

    def _out_of_order(self, number: int, why: str) -> ServiceError:
        return ServiceError(
            ErrorReason.STEP_OUT_OF_ORDER,
            f"call {number} cannot be applied: {why}",
            next_number=str(self.next_number),
        )
