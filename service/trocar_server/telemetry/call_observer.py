"""Call observer: the request, subject, passes, reply and status of one call, for metrics, traces and the log.

The interceptor opens a record for each call; code that works for the call adds to the record of its task:

    with phase("check"):
        await engine.checks.check(plan)
    note_model(plan.model_id)
    note_pass(pass_facts(plan, extraction))

At its end the record is written to the access log: one line with short fields, whatever the request.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import TracebackType
from typing import Any, Protocol

from trocar_server.engine.request.plan import Plan
from trocar_server.engine.run.extraction import Extraction

_MAX_MODEL_CHARACTERS = 80
_MAX_METHOD_CHARACTERS = 120
_MAX_PHASES = 256
"""Of one call: a stream of a million batches keeps the first."""

_STRANGERS_BURST, _STRANGERS_PER_S = 500, 10.0
_DEFECTS_BURST, _DEFECTS_PER_S = 100, 1.0
_STRANGER = "-"
_NANOSECONDS = 1_000_000_000
_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a call's time, in nanoseconds since 1970."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class PassFacts:
    """One finished pass.

    Attributes:
        model_id: The model.
        row_count: The samples of the call itself.
        queue_s: Seconds of waiting for a replica.
        compute_s: Seconds of computation.
        depth: The share of the model's calls that ran before it was stopped; None if unknown.
        engine: The backend that ran it.
        numerics: How close to eager PyTorch.
        is_cached: Whether nothing was computed.
        token_count: The tokens that it generated.
        token_s: Seconds since the token before of its text; None for the first, and without tokens.
    """

    model_id: str
    row_count: int
    queue_s: float
    compute_s: float
    depth: float | None = None
    engine: str = "eager"
    numerics: str = "exact"
    is_cached: bool = False
    token_count: int = 0
    token_s: float | None = None


class CallObserver(Protocol):
    """Observer of every call and pass, on the event loop. Never blocks and never fails."""

    @property
    def wants_phases(self) -> bool:
        """Whether records should keep their phases."""
        ...

    def started(self, call: "CallRecord") -> None:
        """A call has started."""
        ...

    def passed(self, call: "CallRecord", facts: PassFacts) -> None:
        """A pass of a call is done."""
        ...

    def finished(self, call: "CallRecord") -> None:
        """A call has ended; its caller is not informed yet."""
        ...


@dataclass(frozen=True)
class Observers:
    """Several observers as one."""

    members: Sequence[CallObserver] = ()
    wants_phases: bool = field(init=False)
    """Whether one of them wants phases."""

    def __post_init__(self) -> None:
        wants_phases = any(member.wants_phases for member in self.members)
        object.__setattr__(self, "wants_phases", wants_phases)

    def started(self, call: "CallRecord") -> None:
        """Notify each."""
        for member in self.members:
            member.started(call)

    def passed(self, call: "CallRecord", facts: PassFacts) -> None:
        """Notify each."""
        for member in self.members:
            member.passed(call, facts)

    def finished(self, call: "CallRecord") -> None:
        """Notify each."""
        for member in self.members:
            member.finished(call)


NOBODY = Observers()


@dataclass(eq=False, slots=True)
class CallRecord:
    """Record of one call.

    Attributes:
        method: `/package.Service/Method`; registered, or `UNKNOWN_METHOD`.
        kind: `UNARY`, `SERVER_STREAMING`, `CLIENT_STREAMING` or `BIDI_STREAMING`.
        request_id: The caller's, or a new one.
        observer: The observer to notify.
        traceparent: The caller's trace context as W3C writes it; empty where there is none.
        tracestate: The trace state that belongs to it.
        principal: The principal as logged.
        model_id: The caller's id of the model or trainer, unverified.
        code: The name of the gRPC status, `OK` until it fails.
        reason: Why it failed.
        bytes_in: Bytes of request messages.
        bytes_out: Bytes of reply messages.
        messages_in: Number of request messages.
        messages_out: Number of reply messages.
        trace_id: Id of its trace; empty without one.
        phases: Phases of its time; None if not recorded.
        called: The method as the caller wrote it, if it is unknown.
    """

    method: str
    kind: str
    request_id: str
    observer: CallObserver = NOBODY
    traceparent: str = ""
    tracestate: str = ""
    principal: str = "-"
    model_id: str = ""
    code: str = "OK"
    reason: str = ""
    bytes_in: int = 0
    bytes_out: int = 0
    messages_in: int = 0
    messages_out: int = 0
    pass_count: int = 0
    row_count: int = 0
    token_count: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0
    trace_id: str = ""
    started_ns: int = 0
    started: float = 0.0
    elapsed_s: float = 0.0
    phases: list[Phase] | None = field(default=None)
    called: str = ""

    def begin(self) -> None:
        """Make it the record of the current task, and notify the observer."""
        if self.observer.wants_phases:
            self.phases = []
        self.started_ns, self.started = time.time_ns(), time.perf_counter()
        _current.set(self)
        if self.observer is not NOBODY:
            self.observer.started(self)

    def end(self, code: str = "OK", reason: str = "") -> None:
        """Notify the observer of the end."""
        self.code, self.reason = code, reason
        self.elapsed_s = time.perf_counter() - self.started
        if self.observer is not NOBODY:
            self.observer.finished(self)

    def name_model(self, model_id: object) -> None:
        """Set the model or trainer of the call."""
        self.model_id = str(model_id)[:_MAX_MODEL_CHARACTERS]

    def add_phase(self, name: str, start_ns: int, end_ns: int) -> None:
        """Keep a phase, if they are wanted."""
        if self.phases is not None and len(self.phases) < _MAX_PHASES:
            self.phases.append(Phase(name, start_ns, end_ns))


UNKNOWN_METHOD = "/unknown/unknown"
"""Stands for every unknown method."""

_current: ContextVar[CallRecord | None] = ContextVar("trocar_call", default=None)


current_call: Callable[[], CallRecord | None] = _current.get
"""Returns the record of the current task's call; None outside of calls."""


def note_model(model_id: str) -> None:
    """Set the model or trainer of the current call, as soon as it is known."""
    call = _current.get()
    if call is not None:
        call.model_id = model_id[:_MAX_MODEL_CHARACTERS]


def note_pass(facts: PassFacts) -> None:
    """Report a finished pass of the current call to its observer; no effect outside of calls.

    Args:
        facts: Of the pass; see `pass_facts`.
    """
    call = _current.get()
    if call is None:
        return
    call.pass_count += 1
    call.row_count += facts.row_count
    call.token_count += facts.token_count
    call.queue_s += facts.queue_s
    call.compute_s += facts.compute_s
    if call.phases is not None:
        now_ns = time.time_ns()
        began_ns = now_ns - int(facts.compute_s * _NANOSECONDS)
        call.add_phase("queue", began_ns - int(facts.queue_s * _NANOSECONDS), began_ns)
        call.add_phase("pass", began_ns, now_ns)
    if call.observer is not NOBODY:
        call.observer.passed(call, facts)


def note_hit(model_id: str, row_count: int) -> None:
    """Report to the current call's observer that the feature cache answered it."""
    call = _current.get()
    if call is None:
        return
    call.pass_count += 1
    call.row_count += row_count
    call.observer.passed(call, PassFacts(model_id, row_count, 0.0, 0.0, is_cached=True))


def pass_facts(plan: Plan, extraction: Extraction) -> PassFacts:
    """Facts of a pass."""
    report = extraction.report
    # Images, or the first dimension of the first argument.
    row_count = (1 if plan.inputs else 0) if plan.batch_size is None else plan.batch_size
    return PassFacts(
        plan.model_id,
        len(extraction.processed[0].samples) if extraction.processed else row_count,
        extraction.queue_s,
        extraction.compute_s,
        extraction.depth,
        report.engine,
        report.numerics.value,
        report.is_cached,
    )


def phase(name: str) -> AbstractContextManager[None]:
    """Context manager that times a phase of the current call; free without tracing."""
    call = _current.get()
    return _NOTHING if call is None or call.phases is None else _Timing(call, name)


class _Timing(AbstractContextManager[None]):
    """Adds a phase to a call when it ends, also by an error."""

    def __init__(self, call: CallRecord, name: str) -> None:
        self._call, self._name = call, name

    def __enter__(self) -> None:
        self._start_ns = time.time_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._call.add_phase(self._name, self._start_ns, time.time_ns())


@dataclass
class Allowance:
    """Rate limit of log lines (token bucket): a burst, then a number per second.

    Args:
        burst: The most lines at once.
        per_s: Lines per second after that.
        clock: Monotonic seconds.
    """

    burst: float
    per_s: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._left, self._at_s, self._refused = self.burst, self.clock(), 0

    def take(self) -> bool:
        """Whether one more line may be written."""
        now_s = self.clock()
        self._left = min(self.burst, self._left + (now_s - self._at_s) * self.per_s)
        self._at_s = now_s
        if self._left < 1:
            self._refused += 1
            return False
        self._left -= 1
        return True

    def refused(self) -> int:
        """Number of lines suppressed since the last call."""
        count, self._refused = self._refused, 0
        return count


class CallLines:
    """Writes a line for each call; lines about unauthorized callers are rate-limited.

    Args:
        log: structlog's.
    """

    def __init__(self, log: Any) -> None:
        self._log = log
        self._strangers = Allowance(_STRANGERS_BURST, _STRANGERS_PER_S)
        self._defects = Allowance(_DEFECTS_BURST, _DEFECTS_PER_S)

    def write(self, record: CallRecord) -> None:
        """Queue the line of a call: its caller does not wait for our log."""
        if record.principal == _STRANGER:
            if not self._strangers.take():
                return
            if missing := self._strangers.refused():
                self._log.warning("calls without authentication were not logged", count=missing)
        asyncio.get_running_loop().call_soon(partial(self._log.info, "call", **call_line(record)))

    def defect(self, record: CallRecord, error: BaseException) -> None:
        """Log an internal error, with its traceback unless there were many."""
        trace = {"exc_info": error} if self._defects.take() else {"error": type(error).__name__}
        self._log.error("defect", method=record.method, request_id=record.request_id, **trace)


def call_line(record: CallRecord) -> dict[str, Any]:
    """Fields of a call's line; `docs/observability.md` explains them.

    Bytes are those of the messages. Fields that do not apply are omitted: `model`, `reason`, `trace_id`, and
    those of passes.
    """
    result: dict[str, Any] = {
        "method": plain(record.called[:_MAX_METHOD_CHARACTERS]) if record.called else record.method,
        "request_id": record.request_id,
        "principal": plain(record.principal),
        "code": record.code,
        "ms": round(record.elapsed_s * 1000, 2),
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
    }
    if record.model_id:
        result["model"] = plain(record.model_id)
    if record.reason:
        result["reason"] = str(record.reason)
    if record.pass_count:
        result["rows"] = record.row_count
        if record.token_count:
            result["tokens"] = record.token_count
        result["queue_ms"] = round(record.queue_s * 1000, 2)
        result["compute_ms"] = round(record.compute_s * 1000, 2)
    if record.trace_id:
        result["trace_id"] = record.trace_id
    return result


@lru_cache(maxsize=1024)
def plain(text: str) -> str:
    """The text with unprintable characters, including line ends, replaced."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
