"""Counters, gauges and histograms by labels, cheap enough for every call.

Prometheus' own objects take a lock and check every value: a call with one pass cost 38 us with them, and 2
with these. All of one server are changed on its event loop only, so no lock is needed; a scrape copies them,
which Python does atomically.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

Key = tuple[str, ...]
"""The values of the labels, in order."""


@dataclass(frozen=True, eq=False)
class Counts:
    """A number for each combination of label values: a counter, or a gauge.

    calls = Counts("calls", "Calls that ended.", ("model",))
    calls.add(("resnet50",))
    """

    name: str
    help: str
    labels: Sequence[str]
    is_gauge: bool = False
    _values: dict[Key, float] = field(default_factory=dict)

    def add(self, key: Key, amount: float = 1) -> None:
        """Add to one of them."""
        self._values[key] = self._values.get(key, 0) + amount

    def family(self) -> Metric:
        """Convert to a Prometheus metric family."""
        kind = GaugeMetricFamily if self.is_gauge else CounterMetricFamily
        family = kind(self.name, self.help, labels=self.labels)
        for key, value in list(self._values.items()):
            family.add_metric(key, value)
        return family


@dataclass(slots=True)
class _Buckets:
    counts: list[int]
    sum: float = 0.0


@dataclass(frozen=True, eq=False)
class Histograms:
    """A histogram for each combination of label values.

    seconds = Histograms("call_seconds", "Seconds of a call.", ("model",), (0.1, 1.0))
    seconds.observe(("resnet50",), 0.25)
    """

    name: str
    help: str
    labels: Sequence[str]
    bounds: Sequence[float]
    """Upper bounds of the buckets, rising; a value on a bound belongs below."""
    _values: dict[Key, _Buckets] = field(default_factory=dict)

    def observe(self, key: Key, value: float) -> None:
        """Record a value."""
        result = self._values.get(key)
        if result is None:
            result = self._values[key] = _Buckets([0] * (len(self.bounds) + 1))
        result.counts[bisect_left(self.bounds, value)] += 1
        result.sum += value

    def family(self) -> Metric:
        """Convert to a Prometheus metric family: cumulative counts up to each bound."""
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        bounds = [*map(str, map(float, self.bounds)), "+Inf"]
        for key, result in list(self._values.items()):
            counts = accumulate(list(result.counts))
            family.add_metric(key, list(zip(bounds, counts, strict=True)), result.sum)
        return family


@dataclass(frozen=True, eq=False)
class SeriesCollector:
    """Exposes several series to Prometheus' registry."""

    series: Sequence[Counts | Histograms]

    def describe(self) -> Sequence[Metric]:
        """Return nothing, so that nothing is read when it is registered."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        for one in self.series:
            yield one.family()
