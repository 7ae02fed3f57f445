"""Call: one request as a servicer hands it to the engine, with its payloads still to come."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from trocar_server.engine.reply_cache import Question
from trocar_server.engine.request.plan import Payload, Payloads, Plan
from trocar_server.engine.run.extraction import Extraction
from trocar_server.engine.schedule.admission import Reservation


@dataclass(frozen=True)
class Call:
    """A call of `Engine.serve`.

    Attributes:
        plan: The request.
        announced_bytes: The bytes of its payloads.
        receive: Receives these, and reserves their bytes as they arrive.
        phase: Times a part of the call by its name.
        deadline: A time of `time.monotonic()` in seconds, or None.
        key: The request as serialised, without its payloads; None where equal requests share nothing.
        stored: The tensors of stored edits, by the name of their list.
        keeping: Its place in the reply cache; None where it is not looked up.
        arrived: Returns its payloads, where every byte has come with the request; see `receive` otherwise.
        processed: Its payloads, where texts or sound were processed and nothing is to come.
    """

    plan: Plan
    announced_bytes: int
    receive: Callable[[Reservation], Awaitable[list[Payload]]]
    phase: Callable[[str], AbstractContextManager[None]]
    deadline: float | None = None
    key: bytes | None = None
    stored: Mapping[str, Sequence[Payload]] = field(default_factory=dict)
    keeping: "Keeping | None" = None
    arrived: Callable[[], list[Payload]] | None = None
    processed: Payloads | None = None


@dataclass(frozen=True)
class Keeping:
    """Place of a call in the reply cache.

    Attributes:
        question: Its key, without the payloads.
        describe: Serialises the head of a reply.
    """

    question: Question
    describe: Callable[[Extraction], bytes]
