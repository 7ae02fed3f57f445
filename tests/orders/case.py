"""A call that changes state, and its model: what the state is after it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from google.protobuf.message import Message

from tests.orders.world import State
from tests.support.orders.doorway import Answer
from tests.support.orders.stepped_server import SteppedServer

Request: TypeAlias = Sequence[Message | bytes]


class Event(StrEnum):
    """What comes at an await of a call."""

    CANCEL = "cancel"
    LATE = "late"  # cancelled when what it awaits is there, and it has not gone on yet
    TWICE = "twice"  # and again while it cleans up
    DISCONNECT = "disconnect"
    KILL = "kill"
    DRAIN = "drain"
    STOP = "stop"


IN_MEMORY = frozenset(Event) - {Event.KILL, Event.STOP}
STORED_AT_STOP = frozenset(Event) - {Event.KILL}


@dataclass(frozen=True)
class Case:
    """A case.

    Attributes:
        method: Such as `TrainerService/Train`.
        prepare: Brings a fresh server into the state before the call; returns the call's messages.
        change: The model: the state after the call, from the state before.
        name: Told apart from other cases of the method.
        settings: Of the server.
        is_shared: Whether the server is one of several that share trainers, with journals of their steps.
        again: The codes with which the call is answered when it is sent once more after it was applied.
        again_later: Further codes of a server that was started since.
        repeats_after: The events after which the call is sent again; a restarted server may be where it is
            refused: steps without a journal are lost in a kill.
        between: From the states before and after, one in which a server may be that was lost during the call.
    """

    method: str
    prepare: Callable[[SteppedServer], Awaitable[Request]]
    change: Callable[[State], State]
    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_shared: bool = False
    again: tuple[str, ...] = ("OK",)
    again_later: tuple[str, ...] = ()
    repeats_after: frozenset[Event] = frozenset(Event)
    between: Callable[[State, State], State] | None = None

    def __str__(self) -> str:
        return f"{self.method.rpartition('/')[2]}{'-' * bool(self.name)}{self.name}"


class Other:
    """Stands in a model for a value that differs from another one."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return other != self._value

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"other than {self._value!r}"


async def asked(server: SteppedServer, method: str, *messages: Message | bytes) -> Answer:
    """Make a call that must succeed."""
    answer = await server.door.ask(method, *messages)
    assert answer.is_ok, (method, answer)
    return answer


def same(state: State) -> State:
    """Model a call that changes nothing: nothing of it may be left."""
    return state
