"""The HTTP server of metrics."""

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from trocar_server.errors import ServiceError
from trocar_server.metrics_server import MetricsServer
from trocar_server.telemetry.series import Counts, SeriesCollector

HOST = "127.0.0.1"


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    calls = Counts("calls", "Calls.", ("model",))
    calls.add(('odd "name"\n\\',), 3)
    registry.register(SeriesCollector((calls,)))
    return registry


@pytest.fixture
def server(registry: CollectorRegistry) -> Iterator[MetricsServer]:
    server = MetricsServer(make_wsgi_app(registry), HOST, 0)
    yield server
    server.stop()


def get(server: MetricsServer, accept: str = "*/*", method: str = "GET") -> str:
    asked = urllib.request.Request(
        f"http://{HOST}:{server.port}/metrics", headers={"Accept": accept}, method=method
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return str(answer.read().decode())


def test_the_format_is_prometheus(server: MetricsServer) -> None:
    (family,) = text_string_to_metric_families(get(server))
    (sample,) = family.samples
    assert (sample.name, sample.labels, sample.value) == ("calls_total", {"model": 'odd "name"\n\\'}, 3.0)


def test_who_asks_for_openmetrics_gets_it(server: MetricsServer) -> None:
    parse: Any = openmetrics.text_string_to_metric_families  # has no annotations
    (family,) = parse(get(server, "application/openmetrics-text"))
    assert [sample.value for sample in family.samples] == [3.0]


def test_nothing_can_be_sent_to_it(server: MetricsServer) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(server, method="POST")
    with refused.value:
        assert refused.value.code == 405


def test_one_who_says_nothing_holds_up_no_other(server: MetricsServer) -> None:
    silent = [socket.create_connection((HOST, server.port), timeout=60) for _ in range(20)]
    assert "calls_total" in get(server)
    for connection in silent:
        connection.close()


def test_a_taken_port_is_named(server: MetricsServer, registry: CollectorRegistry) -> None:
    with pytest.raises(ServiceError, match=f"{HOST}:{server.port}.*metrics_port"):
        MetricsServer(make_wsgi_app(registry), HOST, server.port)


def test_an_address_that_is_not_ours_is_refused(registry: CollectorRegistry) -> None:
    with pytest.raises(ServiceError, match=r"cannot serve metrics on 192\.0\.2\.1"):
        MetricsServer(make_wsgi_app(registry), "192.0.2.1", 0)


def test_when_it_stops_port_and_thread_are_free(registry: CollectorRegistry) -> None:
    server = MetricsServer(make_wsgi_app(registry), HOST, 0)
    get(server)
    server.stop()
    assert "metrics" not in {thread.name for thread in threading.enumerate()}
    MetricsServer(make_wsgi_app(registry), HOST, server.port).stop()
