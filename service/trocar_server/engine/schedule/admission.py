"""Admission: budgets in bytes and in seconds of computing, per caller and in total.

Bytes are those of inputs and of reply values. Input bytes are checked when they are announced and reserved as
they arrive, so a caller who announces and waits reserves nothing; reply bytes are reserved before they are
computed. All are released when freed or when the call ends. Seconds are the estimated time of admitted work
that is not done yet, learnt from finished passes. Calls never wait here: one that does not fit is refused at
once, with the size that would fit and a retry delay. Read-only and control methods reserve nothing and are
always admitted.

# Note: [Overdraft]

A stream keeps the batches that it has received until they are decoded, and decoding takes more bytes. When
every stream waits for these, none releases any. So a stream with nothing decoded may take what its next batch
needs beyond a budget, one stream at a time for each budget, in the order in which they asked. A budget is
exceeded by one batch at most, and no batch may be larger than a budget.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum, unique
from itertools import takewhile

from trocar_api.reasons import ErrorReason
from trocar_server.cgroup_memory import memory_limit_bytes
from trocar_server.config import Limits
from trocar_server.errors import ServiceError, busy

_MEMORY_SHARE = 0.5
_PRINCIPAL_SHARE = 0.5
_FIRST_GUESS_S = 0.01
_DOWN, _UP = 0.5, 0.1
_ENOUGH = 3


@unique
class MethodClass(StrEnum):
    """Kind of work of a call."""

    EXTRACT = "extract"
    STREAM = "stream"
    GRADIENTS = "gradients"
    TRAIN = "train"
    DATA = "data"


_CLASS_SHARES = {
    MethodClass.EXTRACT: 0.75,
    MethodClass.STREAM: 0.75,
    MethodClass.GRADIENTS: 0.75,
    MethodClass.TRAIN: 0.5,
    MethodClass.DATA: 0.25,
}
"""Largest share of all bytes for each class, so that no class can starve the others."""


@dataclass(eq=False)
class _Budget:
    """The part of a budget that is taken."""

    byte_count: int = 0
    seconds: float = 0.0
    calls: int = 0


@dataclass(eq=False)
class Reservation:
    """Reservation of one call in the budgets; released when its context ends."""

    kind: MethodClass
    flow: str
    _admission: "Admission"
    _budgets: "tuple[_Budget, _Budget, _Budget]"
    """Of its class, of its flow and of all calls."""
    byte_count: int = 0
    seconds: float = 0.0

    def reserve(
        self,
        byte_count: int,
        rows: int = 1,
        *,
        kept_bytes: int | None = None,
        may_overdraw: bool = False,
        seconds: float | None = None,
    ) -> None:
        """Reserve bytes, and seconds of computing.

        Args:
            byte_count: Number of bytes.
            rows: Number of their samples, for the error to state how many would fit.
            kept_bytes: The part of those reserved already that the call keeps while it waits: a stream
                releases those of earlier batches. All of them when None.
            may_overdraw: Whether the budgets may be exceeded, when it is this stream's turn, until
                `end_overdraft`; see Note: [Overdraft].
            seconds: Estimated seconds of computing, if they are known with the bytes; see `expect`.

        Raises:
            ServiceError: `SERVER_BUSY`, they do not fit now; `REQUEST_TOO_LARGE`, they never will.
        """
        self.check(byte_count, rows, kept_bytes=kept_bytes, may_overdraw=may_overdraw, seconds=seconds)
        self.add(byte_count, seconds or 0.0)

    def check(
        self,
        byte_count: int,
        rows: int = 1,
        *,
        kept_bytes: int | None = None,
        may_overdraw: bool = False,
        seconds: float | None = None,
    ) -> None:
        """Refuse what would not fit now; reserves nothing, as announced bytes may never arrive.

        Raises:
            ServiceError: As `reserve` does.
        """
        before = self.byte_count if kept_bytes is None else kept_bytes
        self._admission.check_bytes(self, byte_count, rows, before, may_overdraw)
        if seconds is not None and self._budgets[1].seconds:
            self._admission.check_seconds(self, seconds)

    def grow(self, byte_count: int) -> None:
        """Reserve bytes that arrived, which were checked when they were announced.

        Raises:
            ServiceError: `SERVER_BUSY`, other calls have reserved the room meanwhile.
        """
        self._admission.check_growth(self, byte_count)
        self.add(byte_count)

    def add(self, byte_count: int, seconds: float = 0.0) -> None:
        """Reserve bytes that exist already, or release some when negative; never refused."""
        self.byte_count += byte_count
        self.seconds += seconds
        for budget in self._budgets:
            budget.byte_count += byte_count
            budget.seconds = max(0.0, budget.seconds + seconds)

    def expect(self, seconds: float) -> None:
        """Reserve seconds of computing.

        Raises:
            ServiceError: `SERVER_BUSY`, too many are reserved.
        """
        self._admission.check_seconds(self, seconds)
        self.add(0, seconds)

    def computed(self) -> None:
        """Release the seconds: the work is done."""
        self.add(0, -self.seconds)

    def settle(self, byte_count: int) -> None:
        """Release the seconds and every byte but the reply's: the work is done."""
        self.add(byte_count - self.byte_count, -self.seconds)

    @property
    def most_bytes(self) -> int:
        """The most bytes that a call of its class may reserve."""
        return self._admission.most_bytes(self.kind)

    def free_bytes(self) -> int:
        """Return the bytes that still fit its budgets; negative where bytes were added that exist already."""
        of_class, of_flow, of_all = self._budgets
        limits = self._admission.limits
        return min(
            limits.max_principal_bytes - of_flow.byte_count,
            self._admission.class_bytes[self.kind] - of_class.byte_count,
            limits.max_pending_bytes - of_all.byte_count,
        )

    def exceeded(self, byte_count: int = 0) -> list[_Budget]:
        """Return its budgets that are exceeded, or would be with some bytes more."""
        limits = self._admission.limits
        most = (self._admission.class_bytes[self.kind], limits.max_principal_bytes, limits.max_pending_bytes)
        pairs = zip(self._budgets, most, strict=True)
        return [budget for budget, limit in pairs if budget.byte_count + byte_count > limit]

    def is_of(self, budgets: Sequence[_Budget]) -> bool:
        """Whether any of these budgets counts this reservation."""
        return any(budget in self._budgets for budget in budgets)

    def end_overdraft(self) -> None:
        """Let the next stream exceed the budgets, or stop waiting for that."""
        self._admission.overdrafts.pop(self, None)

    def end(self) -> None:
        """Release everything."""
        for budget in self._budgets:
            budget.byte_count -= self.byte_count
            budget.calls -= 1  # at 0 reset: sums of floats drift
            budget.seconds = max(0.0, budget.seconds - self.seconds) if budget.calls else 0.0
        self.byte_count, self.seconds = 0, 0.0


@dataclass
class Admission:
    """Admission of calls. Belongs to one event loop.

        with admission.admit(MethodClass.EXTRACT, flow) as reservation:
            reservation.reserve(602_112)
            reservation.expect(0.02)
            ...

    Args:
        limits: The budgets, `max_pending_...` and `max_principal_...`, without zeros; see `with_budgets`.
    """

    limits: Limits
    is_idle: bool = True
    """Whether no call is admitted."""
    sharers: int = 1
    """Servers that share the calls of each caller; each admits an equal part of `max_principal_s`."""
    overdrafts: dict[Reservation, None] = field(default_factory=dict)
    """Those that exceed a budget, or wait for their turn to do so, in order; see Note: [Overdraft]."""
    _total: _Budget = field(default_factory=_Budget)
    _flows: dict[str, _Budget] = field(default_factory=dict)
    _classes: dict[MethodClass, _Budget] = field(
        default_factory=lambda: {kind: _Budget() for kind in MethodClass}
    )

    def __post_init__(self) -> None:
        most = self.limits.max_pending_bytes
        self.class_bytes = {kind: int(most * share) for kind, share in _CLASS_SHARES.items()}
        """The most bytes for all calls of each class."""

    @contextmanager
    def admit(self, kind: MethodClass, flow: str) -> Iterator[Reservation]:
        """Admit a call, with nothing reserved yet; its reservation is released when the context ends."""
        own = self._flows.setdefault(flow, _Budget())
        budgets = (self._classes[kind], own, self._total)
        reservation = Reservation(kind, flow, self, budgets)
        for budget in budgets:
            budget.calls += 1
        self.is_idle = False
        try:
            yield reservation
        finally:
            reservation.end()
            self.overdrafts.pop(reservation, None)
            self.is_idle = not self._total.calls
            if not own.calls:
                del self._flows[flow]

    def reserved(self, flow: str | None = None, kind: MethodClass | None = None) -> tuple[int, float, int]:
        """Return reserved bytes, seconds and calls: of a flow, of a class, or of all."""
        result = self._total
        if flow is not None:
            result = self._flows.get(flow, _Budget())
        elif kind is not None:
            result = self._classes[kind]
        return result.byte_count, result.seconds, result.calls

    def most_bytes(self, kind: MethodClass) -> int:
        """Return the most bytes that one call of a class may reserve."""
        limits = self.limits
        return min(limits.max_principal_bytes, self.class_bytes[kind], limits.max_pending_bytes)

    def flows(self) -> tuple[str, ...]:
        """Return the flows that have admitted calls."""
        return tuple(self._flows)

    def check_bytes(
        self, reservation: Reservation, byte_count: int, rows: int, before: int, may_overdraw: bool
    ) -> None:
        """Refuse bytes that do not fit beside those reserved before; see `Reservation.reserve`."""
        whole = before + byte_count
        of_class = self.class_bytes[reservation.kind]
        most = min(self.limits.max_principal_bytes, of_class, self.limits.max_pending_bytes)
        if whole > most:
            raise ServiceError(
                ErrorReason.REQUEST_TOO_LARGE,
                f"inputs and reply take {whole:,} bytes together, and one caller may "
                f"have {most:,} at once; send {_batch(most, whole, rows)}",
                byte_count=str(whole),
                limit=str(most),
            )
        free = reservation.free_bytes()
        if byte_count > free and not (may_overdraw and self._has_turn(reservation, byte_count)):
            raise self._busy(
                reservation,
                f"the call needs {byte_count:,} bytes of memory and {max(0, free):,} are free for it; "
                f"send {_batch(free + before, whole, rows)}",
                free_bytes=str(max(0, free)),
                fitting_rows=str(_fitting(free + before, whole, rows)),
            )

    def _has_turn(self, reservation: Reservation, byte_count: int) -> bool:
        """Whether no earlier stream exceeds, or waits to exceed, a budget that these bytes would exceed."""
        self.overdrafts.setdefault(reservation)
        exceeded = reservation.exceeded(byte_count)
        earlier = takewhile(lambda other: other is not reservation, self.overdrafts)
        return not any(other.is_of(exceeded) for other in earlier)

    def check_growth(self, reservation: Reservation, byte_count: int) -> None:
        """Refuse arrived bytes when other calls have reserved the room meanwhile."""
        free = reservation.free_bytes()
        if byte_count > free:
            raise self._busy(
                reservation,
                f"the received inputs no longer fit into memory: {max(0, free):,} bytes are free for them",
                free_bytes=str(max(0, free)),
            )

    def check_seconds(self, reservation: Reservation, seconds: float) -> None:
        """Refuse work that would have to wait too long; a caller without waiting work is admitted."""
        own, total = self._flows[reservation.flow], self._total
        own_limit = self.limits.max_principal_s / self.sharers
        if own.seconds and own.seconds + seconds > own_limit:
            taken, limit, whose = own.seconds, own_limit, "your admitted calls"
        elif own.seconds and total.seconds + seconds > self.limits.max_pending_s:
            taken, limit, whose = total.seconds, self.limits.max_pending_s, "all admitted calls"
        else:
            return
        raise self._busy(
            reservation,
            f"{whose} need about {taken:.3g} s and this call {seconds:.3g} s, "
            f"together more than the limit of {limit:.6g} s; wait until some of them end",
        )

    def _busy(self, reservation: Reservation, problem: str, **facts: str) -> ServiceError:
        """Return `SERVER_BUSY`; the retry delay is the mean remaining time of an admitted call."""
        wait_s = self._total.seconds / max(1, self._total.calls)
        return busy(f"{problem}; or try again later", wait_s or None, method_class=reservation.kind, **facts)


def with_budgets(limits: Limits, memory: Callable[[], int] | None = None) -> Limits:
    """Return the limits with zeros replaced by shares of the memory that this process may use."""
    total = limits.max_pending_bytes or int((memory or memory_limit_bytes)() * _MEMORY_SHARE)
    own = limits.max_principal_bytes or int(total * _PRINCIPAL_SHARE)
    return limits.model_copy(update={"max_pending_bytes": total, "max_principal_bytes": min(own, total)})


def _fitting(free: int, byte_count: int, rows: int) -> int:
    return max(0, free) * rows // max(1, byte_count)


def _batch(free: int, byte_count: int, rows: int) -> str:
    """Return a phrase with the batch size that would fit."""
    count = _fitting(free, byte_count, rows)
    return f"a batch of {count} at most" if count else "less"


class PassThroughput:
    """Seconds for each row, as a running average.

        throughput = PassThroughput()
        throughput.observe(rows=8, seconds=0.12)
        throughput.seconds(rows=16)                   # 0.24

    It follows faster passes sooner than slower ones: first passes are slow, and a call must not be refused as
    too late on weak evidence.
    """

    def __init__(self) -> None:
        self._row_s = _FIRST_GUESS_S
        self._count = 0

    @property
    def is_known(self) -> bool:
        """Whether there are enough observations to rely on it."""
        return self._count >= _ENOUGH

    def seconds(self, rows: int = 1) -> float:
        """Return about how long a number of rows takes."""
        return self._row_s * max(1, rows)

    def known_seconds(self, rows: int = 1) -> float:
        """Return about how long a number of rows takes; 0 while there are too few observations."""
        return self._row_s * max(1, rows) if self._count >= _ENOUGH else 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Record the time of a number of rows."""
        row_s = seconds / max(1, rows)
        share = _DOWN if row_s < self._row_s else _UP
        self._row_s = self._row_s + share * (row_s - self._row_s) if self._count else row_s
        self._count += 1
