"""Request statistics of each model over this protocol: counts and nanoseconds."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from weakref import WeakKeyDictionary

from trocar_server.models import CatalogueEntry, HostedModel
from trocar_server.rpc.oip.oip_messages import ModelStatistics

VERSION = "1"
"""The one version that every model has."""


@dataclass(frozen=True)
class Spent:
    """Timings of one request, in seconds."""

    queue: float
    compute_input: float
    compute_infer: float
    compute_output: float
    is_cached: bool = False
    """Whether nothing was computed."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.queue + self.compute_input + self.compute_infer + self.compute_output


@dataclass
class _Duration:
    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += round(seconds * 1e9)


@dataclass
class _Durations:
    queue: _Duration = field(default_factory=_Duration)
    compute_input: _Duration = field(default_factory=_Duration)
    compute_infer: _Duration = field(default_factory=_Duration)
    compute_output: _Duration = field(default_factory=_Duration)

    def add(self, spent: Spent) -> None:
        for part in fields(self):
            getattr(self, part.name).add(getattr(spent, part.name))


@dataclass
class ModelCounters:
    """The counts of one model."""

    success: _Duration = field(default_factory=_Duration)
    fail: _Duration = field(default_factory=_Duration)
    cache_hit: _Duration = field(default_factory=_Duration)
    parts: _Durations = field(default_factory=_Durations)
    of_batch: dict[int, _Durations] = field(default_factory=dict)
    """By the number of samples, of which there are at most `Limits.max_batch`."""
    sample_count: int = 0
    last_ms: int = 0

    def succeeded(self, batch: int, spent: Spent) -> None:
        """Count a request that was answered."""
        self.success.add(spent.total)
        if spent.is_cached:
            self.cache_hit.add(spent.total)
        self.parts.add(spent)
        self.of_batch.setdefault(batch, _Durations()).add(spent)
        self.sample_count += batch
        self.last_ms = time.time_ns() // 1_000_000

    def failed(self, seconds: float) -> None:
        """Count a request that was refused, or stopped."""
        self.fail.add(seconds)
        self.last_ms = time.time_ns() // 1_000_000


class Counters:
    """The counts of all models since the server started. Belongs to one event loop.

    Those of a model are removed with its entry in the catalogue.
    """

    def __init__(self) -> None:
        self._models: WeakKeyDictionary[CatalogueEntry, ModelCounters] = WeakKeyDictionary()

    def of(self, entry: CatalogueEntry) -> ModelCounters:
        """Return the counts of a model."""
        return self._models.setdefault(entry, ModelCounters())

    def describe(self, entry: CatalogueEntry) -> Any:
        """Return the `ModelStatistics` of a model."""
        counted = self.of(entry)
        message = ModelStatistics(
            name=entry.spec.model_id,
            version=VERSION,
            last_inference=counted.last_ms,
            inference_count=counted.sample_count,
            execution_count=counted.success.count - counted.cache_hit.count,
            inference_stats={
                "success": vars(counted.success),
                "fail": vars(counted.fail),
                **_parts(counted.parts),
                "cache_hit": vars(counted.cache_hit),
                "cache_miss": {},
            },
            batch_stats=[_batch(size, counted.of_batch[size]) for size in sorted(counted.of_batch)],
        )
        if entry.hosted is not None:
            message.memory_usage.add(**_memory(entry.hosted))
        return message


def _parts(parts: _Durations) -> dict[str, Mapping[str, int]]:
    return {part.name: vars(getattr(parts, part.name)) for part in fields(parts)}


def _batch(size: int, parts: _Durations) -> dict[str, Any]:
    result: dict[str, Any] = {"batch_size": size, **_parts(parts)}
    del result["queue"]
    return result


def _memory(hosted: HostedModel) -> dict[str, Any]:
    kind = "CPU" if hosted.device.type == "cpu" else "GPU"
    return {"type": kind, "id": hosted.device.index or 0, "byte_size": hosted.byte_count}
