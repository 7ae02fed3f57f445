"""Which calls are let in: budgets in bytes and in seconds of computing, for each caller and for all.

Bytes are of inputs and of values of replies: they are taken before they come, and given back when they have
gone or the call has ended. Seconds are of work that was let in and not yet done, by estimate. Nobody waits
here: what does not fit is refused at once, with what would fit and when to come again. Methods that only look
or control ask for nothing, so nothing keeps them out.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum, unique
from pathlib import Path

from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.errors import ServiceError, busy

_MEMORY_SHARE = 0.5
_PRINCIPAL_SHARE = 0.5
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


@unique
class MethodClass(StrEnum):
    """What kind of work a call is."""

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
"""Of all bytes, how many each class may have: none of them can shut out the others."""


@dataclass
class _Held:
    byte_count: int = 0
    seconds: float = 0.0
    calls: int = 0


@dataclass(eq=False)
class Reservation:
    """What one call has of the budgets; everything goes back when its context ends."""

    kind: MethodClass
    flow: str
    _admission: "Admission"
    byte_count: int = 0
    seconds: float = 0.0

    def reserve(self, byte_count: int, rows: int = 1, *, is_alone: bool = False) -> None:
        """Take bytes that will come.

        Args:
            byte_count: How many.
            rows: Samples that they are of, to say how many would fit.
            is_alone: Whether they are needed without those that the call has already, as the batches of a
                stream are.

        Raises:
            ServiceError: `SERVER_BUSY`, they do not fit now; `REQUEST_TOO_LARGE`, they never will.
        """
        self._admission.check_bytes(self, byte_count, rows, 0 if is_alone else self.byte_count)
        self.add(byte_count)

    def add(self, byte_count: int) -> None:
        """Take bytes that are there already, or with a minus give some back; nobody is refused for that."""
        self.byte_count += byte_count
        self._admission.change(self, byte_count, 0.0)

    def expect(self, seconds: float) -> None:
        """Take seconds of computing.

        Raises:
            ServiceError: `SERVER_BUSY`, too many are taken.
        """
        self._admission.check_seconds(self, seconds)
        self.seconds += seconds
        self._admission.change(self, 0, seconds)

    def computed(self) -> None:
        """Give back the seconds: the work is done."""
        seconds, self.seconds = self.seconds, 0.0
        self._admission.change(self, 0, -seconds)


@dataclass
class Admission:
    """Lets calls in. Belongs to one event loop.

        with admission.admit(MethodClass.EXTRACT, flow) as held:
            held.reserve(602_112)
            held.expect(0.02)
            ...

    Args:
        limits: Whose `max_pending_...` and `max_principal_...` count, 0 replaced; see `with_budgets`.
    """

    limits: Limits
    _total: _Held = field(default_factory=_Held)
    _flows: dict[str, _Held] = field(default_factory=dict)
    _classes: dict[MethodClass, _Held] = field(
        default_factory=lambda: {kind: _Held() for kind in MethodClass}
    )

    @contextmanager
    def admit(self, kind: MethodClass, flow: str) -> Iterator[Reservation]:
        """Let a call in, with nothing reserved yet; what it has when the context ends goes back."""
        held = Reservation(kind, flow, self)
        self._flows.setdefault(flow, _Held())
        for budget in self._budgets(held):
            budget.calls += 1
        try:
            yield held
        finally:
            held.computed()
            held.add(-held.byte_count)
            for budget in self._budgets(held):
                budget.calls -= 1
                if not budget.calls:  # sums of floats drift
                    budget.seconds = 0.0
            if not self._flows[flow].calls:
                del self._flows[flow]

    def held(self, flow: str | None = None, kind: MethodClass | None = None) -> tuple[int, float, int]:
        """Return bytes, seconds and calls of a flow or of a class, or else of all."""
        found = self._total
        if flow is not None:
            found = self._flows.get(flow, _Held())
        elif kind is not None:
            found = self._classes[kind]
        return found.byte_count, found.seconds, found.calls

    def change(self, held: Reservation, byte_count: int, seconds: float) -> None:
        """Note what a reservation took, or with a minus gave back."""
        for budget in self._budgets(held):
            budget.byte_count += byte_count
            budget.seconds = max(0.0, budget.seconds + seconds)

    def check_bytes(self, held: Reservation, byte_count: int, rows: int, before: int) -> None:
        """Refuse bytes that do not fit beside those that were taken before; see `Reservation.reserve`."""
        whole = before + byte_count
        of_class = self.class_bytes(held.kind)
        most = min(self.limits.max_principal_bytes, of_class, self.limits.max_pending_bytes)
        if whole > most:
            raise ServiceError(
                ErrorReason.REQUEST_TOO_LARGE,
                f"inputs and reply take {whole:,} bytes together, and one caller may "
                f"have {most:,} at once; send {_batch(most, whole, rows)}",
                byte_count=str(whole),
                limit=str(most),
            )
        free = min(
            self.limits.max_principal_bytes - self._flows[held.flow].byte_count,
            of_class - self._classes[held.kind].byte_count,
            self.limits.max_pending_bytes - self._total.byte_count,
        )
        if byte_count > free:
            raise self._busy(
                held,
                f"the call needs {byte_count:,} bytes and {max(0, free):,} are free for it; "
                f"send {_batch(free + before, whole, rows)}",
                free_bytes=str(max(0, free)),
                fitting_rows=str(_fitting(free + before, whole, rows)),
            )

    def check_seconds(self, held: Reservation, seconds: float) -> None:
        """Refuse work that would have to wait too long; who has none waiting is let in."""
        own, total = self._flows[held.flow], self._total
        if own.seconds and own.seconds + seconds > self.limits.max_principal_s:
            taken, limit, whose = own.seconds, self.limits.max_principal_s, "your calls"
        elif own.seconds and total.seconds + seconds > self.limits.max_pending_s:
            taken, limit, whose = total.seconds, self.limits.max_pending_s, "all calls"
        else:
            return
        raise self._busy(
            held,
            f"{whose} that were let in need about {taken:.3g} s already, and this one {seconds:.3g} s, "
            f"of {limit:.6g} s; wait for some of them",
        )

    def class_bytes(self, kind: MethodClass) -> int:
        """Return how many bytes all calls of a class may have."""
        return int(self.limits.max_pending_bytes * _CLASS_SHARES[kind])

    def _budgets(self, held: Reservation) -> tuple[_Held, ...]:
        return self._total, self._flows[held.flow], self._classes[held.kind]

    def _busy(self, held: Reservation, problem: str, **facts: str) -> ServiceError:
        """Say no for now; what an average call that was let in still needs is when one will have ended."""
        wait_s = self._total.seconds / max(1, self._total.calls)
        return busy(f"{problem}; or try again later", wait_s or None, method_class=held.kind, **facts)


def with_budgets(limits: Limits, memory: Callable[[], int] | None = None) -> Limits:
    """Return the limits with numbers in place of zeros that stand for shares of the host's memory."""
    total = limits.max_pending_bytes or int((memory or host_memory)() * _MEMORY_SHARE)
    own = limits.max_principal_bytes or int(total * _PRINCIPAL_SHARE)
    return limits.model_copy(update={"max_pending_bytes": total, "max_principal_bytes": min(own, total)})


def host_memory(container_limit: Path = _CONTAINER_LIMIT) -> int:
    """Return the bytes of memory of this machine, or of the container where it may use less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = container_limit.read_text().strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdecimal() else machine


def _fitting(free: int, byte_count: int, rows: int) -> int:
    return max(0, free) * rows // max(1, byte_count)


def _batch(free: int, byte_count: int, rows: int) -> str:
    """Say what would fit."""
    count = _fitting(free, byte_count, rows)
    return f"a batch of {count} at most" if count else "less"
