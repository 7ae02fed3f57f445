"""Routing table of a gateway: the replicas that serve, and the choice of the one with the least waiting work.

table.update(reports)
replica = table.least_waiting("resnet18")
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_SUSPECT_S = 1.0
"""For so long a replica that broke a call is chosen only if there is no other."""
_FIXED = ("replica_id", "model_id", "address", "client_address", "metrics_address", "slot")
_CALL_S = 0.001
"""The least that a call is taken to last, in seconds."""


@dataclass
class Replica:
    """A replica as a gateway sees it.

    Attributes:
        replica_id: Its id; a replica that is started in its place has another.
        model_id: Its model.
        address: Where it listens for gateways.
        client_address: Where it listens for clients: the same, or with TLS.
        metrics_address: Where its metrics are; empty if they are off.
        slot: Its state folder among those of the model; a replica in its place has the same.
    """

    replica_id: str
    model_id: str
    address: str
    client_address: str
    metrics_address: str
    slot: str
    waiting_s: float = 0.0
    """Seconds of admitted work, as of its last report."""
    call_count: int = 0
    """Admitted calls, as of its last report."""
    is_draining: bool = False
    sent_count: int = 0
    """Calls sent since its last report."""
    open_count: int = 0
    """Calls of this gateway that run."""
    suspect_until: float = 0.0

    @property
    def is_suspect(self) -> bool:
        """Whether it broke a call a moment ago."""
        return time.monotonic() < self.suspect_until

    def cost(self) -> tuple[bool, float, int]:
        """Sort key: the replica with the least is chosen."""
        call_s = max(_CALL_S, self.waiting_s / self.call_count if self.call_count else 0.0)
        waiting_s = self.waiting_s + self.sent_count * call_s
        return self.is_suspect, max(waiting_s, self.open_count * _CALL_S), self.open_count

    def suspect(self) -> None:
        """Prefer other replicas for a second: it broke a call."""
        self.suspect_until = time.monotonic() + _SUSPECT_S


class ReplicaTable:
    """The replicas of all models. Belongs to one event loop."""

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self._wanted: dict[str, int] = {}
        self._changed = asyncio.Event()

    def update(self, reports: Iterable[Mapping[str, Any]], wanted: Mapping[str, int]) -> None:
        """Take the latest reports.

        Args:
            reports: `replica_id`, `model_id`, `address`, `client_address`, `metrics_address`, `slot`,
                `waiting_s`, `call_count` and `is_draining` of each replica.
            wanted: The least number of replicas by model id.
        """
        replicas, before = {}, self._states()
        for report in reports:
            fields = {key: report[key] for key in _FIXED}
            replica = self._replicas.get(report["replica_id"]) or Replica(**fields)
            replica.waiting_s, replica.call_count = report["waiting_s"], report["call_count"]
            replica.is_draining, replica.sent_count = report["is_draining"], 0
            replicas[replica.replica_id] = replica
        self._replicas, self._wanted = replicas, dict(wanted)
        if self._states() != before:
            self._changed.set()
            self._changed = asyncio.Event()

    def _states(self) -> object:
        """Return what a call that finds no replica waits for: not the load, told four times a second."""
        return {(one.replica_id, one.is_draining) for one in self._replicas.values()}, self._wanted

    async def changed(self, timeout_s: float) -> None:
        """Wait until replicas come, go or drain, at most `timeout_s` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    @property
    def model_ids(self) -> Sequence[str]:
        """The configured models."""
        return tuple(self._wanted)

    @property
    def is_complete(self) -> bool:
        """Whether every model has its least number of replicas."""
        return all(len(self.serving(model_id)) >= count for model_id, count in self._wanted.items())

    def all(self) -> list[Replica]:
        """Every replica, draining or not."""
        return list(self._replicas.values())

    def serving(self, model_id: str = "") -> list[Replica]:
        """Replicas that accept work: of a model, or of all; lowest slot first."""
        result = [
            replica
            for replica in self._replicas.values()
            if not replica.is_draining and model_id in ("", replica.model_id)
        ]
        return sorted(result, key=lambda replica: (replica.model_id, int(replica.slot)))

    def least_waiting(self, model_id: str = "", excluded: Sequence[Replica] = ()) -> Replica | None:
        """Return the replica with the least waiting work, or None.

        Args:
            model_id: Its model; any when empty.
            excluded: Replicas that are not chosen.
        """
        result = [replica for replica in self.serving(model_id) if replica not in excluded]
        return min(result, key=Replica.cost, default=None)

    def at(self, replica_id: str) -> Replica | None:
        """Return a replica, draining or not; None if it is gone."""
        return self._replicas.get(replica_id)

    def metrics_addresses(self) -> dict[str, str]:
        """Addresses of metrics by model and slot, as `resnet50/0`; may be called on any thread."""
        replicas = self._replicas.values()  # replaced, never changed
        return {
            f"{replica.model_id}/{replica.slot}": replica.metrics_address
            for replica in replicas
            if replica.metrics_address
        }

    def addresses(self) -> set[str]:
        """Addresses of all replicas."""
        return {replica.address for replica in self._replicas.values()}
