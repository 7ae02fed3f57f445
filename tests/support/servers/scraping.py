"""What a server's metrics say, read over HTTP by Prometheus' own parser."""

import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.servers.running_server import RunningServer

WAIT_S = 60.0


@dataclass(frozen=True)
class Scrape:
    """One answer."""

    text: str

    def families(self) -> Iterator[Metric]:
        """Yield the metrics with their samples."""
        yield from text_string_to_metric_families(self.text)

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of this name that have these labels; 0 where there is none."""
        return sum(
            sample.value
            for family in self.families()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def label_values(self, label: str) -> set[str]:
        """Return all values of a label."""
        samples = (sample for family in self.families() for sample in family.samples)
        return {sample.labels[label] for sample in samples if label in sample.labels}

    def names(self) -> set[str]:
        """Return the names of all samples."""
        return {sample.name for family in self.families() for sample in family.samples}

    @property
    def series_count(self) -> int:
        """How many series there are."""
        return sum(len(family.samples) for family in self.families())


def scrape(server: RunningServer) -> Scrape:
    """Ask a server that was started with `metrics_port=0`."""
    port = server.app.telemetry.metrics_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
        return Scrape(answer.read().decode())


def scrape_until(server: RunningServer, is_so: Callable[[Scrape], bool]) -> Scrape:
    """Ask again and again until something is so: what a caller does not wait for comes when it comes."""
    end = monotonic() + WAIT_S
    while not is_so(found := scrape(server)):
        assert monotonic() < end, found.text
    return found
