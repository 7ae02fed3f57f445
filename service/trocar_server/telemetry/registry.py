"""Where the metrics of one server are: several servers in one process do not mix."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric

_CREATED = "_created"


class LeanRegistry(CollectorRegistry):
    """Prometheus' registry without the `_created` series, which double the series and tell nothing here.

    The client library can only leave them out for the whole process.
    """

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith(_CREATED)]
            yield metric
