"""Numbered calls of one trainer: each is applied exactly once and in order, however often it is sent.

async with numbering.turn(number) as turn:
    if turn.result is None:
        turn.finish(await apply())
return turn.result
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

Result = TypeVar("Result")

RESULTS_KEPT = 64
"""Number of results that are kept, to answer repeated calls."""
MOST_AHEAD = 64
"""How many numbers a call may be ahead of the next one."""
AGAIN_WITHIN_S = 10.0
"""How long calls behind a cancelled one wait for it to be sent again."""


@dataclass(frozen=True)
class KeptCall(Generic[Result]):
    """A call whose result is kept."""

    number: int
    kind: str
    result: Result


@dataclass(eq=False)
class Turn(Generic[Result]):
    """One call with exclusive use of the trainer.

    Attributes:
        number: The call's number; -1 while a call without one waits.
        kind: The call's kind.
        result: Its result; None until it is applied.
    """

    number: int
    kind: str
    result: Result | None = None
    is_new: bool = False

    def finish(self, result: Result) -> None:
        """Set the call's result: from now on it counts as applied."""
        self.result, self.is_new = result, True


@dataclass
class Numbering(Generic[Result]):
    """Runs calls one at a time, in order of their numbers. Belongs to one event loop.

    Attributes:
        next_number: Number of the next call to apply.
    """

    next_number: int = 0
    _kept: "OrderedDict[int, tuple[str, Result | None]]" = field(default_factory=OrderedDict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: "dict[int, list[asyncio.Future[None]]]" = field(default_factory=dict)
    _present: "set[Turn[Result]]" = field(default_factory=set)
    """Calls that wait or run."""

    @asynccontextmanager
    async def turn(self, number: int | None, kind: str) -> AsyncIterator[Turn[Result]]:
        """Wait for a call's turn; see the module docstring.

        A call that is cancelled behind `Turn.finish` counts as applied: sent again, it gets its result.

        Args:
            number: The call's number; the next one when None.
            kind: The call's kind.

        Raises:
            ServiceError: `STEP_OUT_OF_ORDER`: the number is too old, too far ahead or already used by
                another call, or the call before it failed.
        """
        turn: Turn[Result] = Turn(-1 if number is None else number, kind)
        self._present.add(turn)
        try:
            if turn.number > self.next_number:
                await self._wait(turn.number)
            async with self._lock:
                if number is None:
                    turn.number = self.next_number
                if turn.number > self.next_number:  # a restore came in between
                    raise self._out_of_order(turn.number, f"the next one is {self.next_number}")
                if turn.number < self.next_number:
                    turn.result = self._cached_result(turn.number, kind)
                try:
                    yield turn
                except BaseException as error:
                    if not turn.is_new and not isinstance(error, asyncio.CancelledError):
                        self._fail_waiting(turn.number)
                    raise
                finally:
                    if turn.is_new and turn.result is not None:
                        self._applied(turn, is_numbered=number is not None)
        except asyncio.CancelledError:
            if not turn.is_new:
                self._expect_again(turn.number)
            raise
        finally:
            self._present.discard(turn)

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """Block calls inside the context."""
        async with self._lock:
            yield

    def begin_at(self, number: int) -> None:
        """Continue with another number after a restore; earlier results are forgotten."""
        self.next_number = number
        self._kept.clear()
        for earlier in [waiting for waiting in self._waiting if waiting <= number]:
            self._wake(earlier)
        self._fail_waiting(number, "the trainer was restored to another update")

    def kept(self) -> "list[KeptCall[Result]]":
        """Return the calls whose results are kept, oldest first."""
        return [
            KeptCall(number, kind, result)
            for number, (kind, result) in self._kept.items()
            if result is not None
        ]

    def keep(self, calls: "Iterable[KeptCall[Result]]") -> None:
        """Keep the results of calls of an earlier run, which may be repeated."""
        for call in calls:
            self._kept[call.number] = call.kind, call.result

    async def _wait(self, number: int) -> None:
        if number - self.next_number > MOST_AHEAD:
            raise self._out_of_order(number, f"the next one is {self.next_number}")
        turn = asyncio.get_running_loop().create_future()
        turns = self._waiting.setdefault(number, [])  # several if a call was sent again
        turns.append(turn)
        try:
            await turn
        finally:
            turns.remove(turn)
            if not turns and self._waiting.get(number) is turns:
                del self._waiting[number]

    def _cached_result(self, number: int, kind: str) -> Result:
        outcome = self._kept.get(number)
        if outcome is None:
            raise self._out_of_order(
                number, f"the next one is {self.next_number}, and its result is no longer stored"
            )
        if outcome[1] is None:
            raise self._out_of_order(number, "a call without a number replaced it")
        if outcome[0] != kind:
            raise self._out_of_order(
                number, f"it was applied as {outcome[0]}; the next one is {self.next_number}"
            )
        return outcome[1]

    def _applied(self, turn: Turn[Result], *, is_numbered: bool) -> None:
        self._kept[turn.number] = (turn.kind, turn.result if is_numbered else None)
        if len(self._kept) > RESULTS_KEPT:
            self._kept.popitem(last=False)
        self.next_number = turn.number + 1
        if self._waiting:
            self._wake(self.next_number)

    def _wake(self, number: int) -> None:
        for turn in self._waiting.get(number, ()):
            if not turn.done():
                turn.set_result(None)

    def _expect_again(self, number: int) -> None:
        """Keep waiting calls for a while: a client sends its call again when its connection breaks."""

        def give_up() -> None:
            is_present = any(turn.number == number for turn in self._present)
            if is_present or not any(later > number for later in self._waiting):
                return
            if self.next_number == number:
                self._fail_waiting(number)
            elif self.next_number < number:  # those before it still run
                self._expect_again(number)

        asyncio.get_running_loop().call_later(AGAIN_WITHIN_S, give_up)

    def _fail_waiting(self, number: int, why: str = "") -> None:
        for later, turns in self._waiting.items():
            for turn in turns:
                if later > number and not turn.done():
                    turn.set_exception(
                        self._out_of_order(later, why or f"the call before it, {number}, failed")
                    )

    def _out_of_order(self, number: int, why: str) -> ServiceError:
        return ServiceError(
            ErrorReason.STEP_OUT_OF_ORDER,
            f"call {number} cannot be applied: {why}",
            next_number=str(self.next_number),
        )
