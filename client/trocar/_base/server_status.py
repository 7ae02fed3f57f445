"""Status of a server for its operator: queues, callers and caches."""

from dataclasses import dataclass

from trocar._base.tables import Columns, Entry, html_table, size_text
from trocar._base.text_tables import text_table


@dataclass(frozen=True)
class QueueStatus:
    """Queue of one model in the server's memory."""

    model_id: str
    """Id of the model, or of the trainer."""
    replica_count: int
    """Number of its replicas."""
    leased_count: int
    """Replicas that run a pass."""
    waiting_count: int
    """Calls that wait for a replica."""
    pending_s: float
    """Estimated seconds of computing that running and waiting calls still need."""


@dataclass(frozen=True)
class CallerStatus:
    """Work of one caller."""

    caller: str
    """Name of its token or certificate. If the server requires none: the begin of a hash of its token, or
    "anonymous" and its address. Empty for the server's own work."""
    call_count: int
    """Admitted calls that compute or carry tensors."""
    waiting_count: int
    """Of these, calls that wait for a replica."""
    byte_count: int
    """Bytes that its inputs and replies take."""
    pending_s: float
    """Estimated seconds of computing that its calls still need."""
    used_s: float
    """Seconds of computing in about the last minute (50 to 60 s)."""


@dataclass(frozen=True)
class CacheStatus:
    """One cache of a server."""

    name: str
    """Its name: "replies", of earlier equal calls."""
    entry_count: int
    """Number of entries."""
    byte_count: int
    """Bytes of its entries."""
    max_bytes: int
    """The most bytes; 0 if it is off."""
    hit_count: int
    """Look-ups that found an entry, since the server started."""
    miss_count: int
    """Look-ups that found none, since the server started."""


@dataclass(frozen=True)
class DeviceStatus:
    """The work that runs on a server's device: a pass, a step or part of a fit, one at a time."""

    user: str
    """Id of the model, or of the trainer, that it is for; empty where nothing runs, or work for neither."""
    held_s: float
    """Seconds for which it has held the device; others wait."""
    is_over_limit: bool
    """Whether that is longer than the server's `max_pass_s`."""


@dataclass(frozen=True)
class ServerStatus:
    """Queues, callers, caches and the device of a server at one moment; prints as tables."""

    queues: tuple[QueueStatus, ...]
    """The queue of each model in memory, by id."""
    callers: tuple[CallerStatus, ...]
    """At most 100 callers with admitted calls, or with computing in the last minute; those with the most
    waiting work first."""
    total: CallerStatus
    """All callers together; its `caller` is empty."""
    caches: tuple[CacheStatus, ...]
    """The caches."""
    device: DeviceStatus = DeviceStatus("", 0.0, is_over_limit=False)
    """The work that runs now."""

    def share(self, caller: CallerStatus) -> float:
        """Return a caller's share of the computing of the last minute, from 0 to 1; 0 if there was none."""
        return caller.used_s / self.total.used_s if self.total.used_s else 0.0

    def __str__(self) -> str:
        parts = self._tables()
        return "\n\n".join(text_table(head, rows, head[1:]) for head, rows in parts if rows)

    def __repr__(self) -> str:
        total = self.total
        return f"<{total.call_count} calls, {total.waiting_count} waiting, {total.pending_s:.3g} s pending>"

    def _repr_html_(self) -> str:
        """Show tables in a notebook."""
        return "".join(html_table(head, rows) for head, rows in self._tables() if rows)

    def _tables(self) -> list[tuple[list[str], list[list[str]]]]:
        callers: Columns[CallerStatus] = {
            "caller": lambda one: one.caller or "(the server)",
            "calls": lambda one: str(one.call_count),
            "waiting": lambda one: str(one.waiting_count),
            "memory": lambda one: size_text(one.byte_count),
            "pending": lambda one: f"{one.pending_s:.3g} s",
            "used in 1 min": lambda one: f"{one.used_s:.3g} s",
            "share": lambda one: f"{self.share(one):.0%}" if self.total.used_s else "",
        }
        return [
            _table(_QUEUES, self.queues),
            _table(callers, self.callers),
            _table(_CACHES, self.caches),
            _table(_DEVICE, (self.device,) if self.device.held_s else ()),
        ]


_QUEUES: Columns[QueueStatus] = {
    "model": lambda one: one.model_id,
    "replicas": lambda one: str(one.replica_count),
    "running": lambda one: str(one.leased_count),
    "waiting": lambda one: str(one.waiting_count),
    "pending": lambda one: f"{one.pending_s:.3g} s",
}
_DEVICE: Columns[DeviceStatus] = {
    "device held by": lambda one: one.user or "(the server)",
    "for": lambda one: f"{one.held_s:.3g} s",
    "over limit": lambda one: "yes" if one.is_over_limit else "no",
}
_CACHES: Columns[CacheStatus] = {
    "cache": lambda one: one.name,
    "entries": lambda one: f"{one.entry_count:,}",
    "size": lambda one: size_text(one.byte_count),
    "limit": lambda one: size_text(one.max_bytes) if one.max_bytes else "off",
    "hits": lambda one: f"{one.hit_count:,}",
    "misses": lambda one: f"{one.miss_count:,}",
}


def _table(columns: Columns[Entry], entries: tuple[Entry, ...]) -> tuple[list[str], list[list[str]]]:
    return list(columns), [[cell(one) for cell in columns.values()] for one in entries]
