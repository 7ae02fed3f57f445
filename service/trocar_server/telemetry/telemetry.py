"""Telemetry of a running server: metrics and traces, each if configured."""

import asyncio
from collections.abc import Callable
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trocar_server.config import ServerConfig
from trocar_server.errors import ServiceError
from trocar_server.telemetry.call_observer import NOBODY, CallObserver, Observers
from trocar_server.telemetry.tracing import CallTracer, open_tracer, wanted_endpoint, why_off

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from trocar_server.engine.engine import Engine
    from trocar_server.metrics_server import MetricsServer
    from trocar_server.telemetry.snapshot import ServerState, Snapshot
    from trocar_server.training.trainers import Trainers

_READ_TIMEOUT_S = 2.0


@dataclass
class Telemetry:
    """Metrics and traces of one server; a disabled part is not even imported.

        telemetry = open_telemetry(config, engine, trainers, log)
        start_server(..., observer=telemetry.observer)
        telemetry.stop()

    Attributes:
        observer: Notified of every call.
        metrics: The HTTP server of metrics, or None.
        tracer: Makes spans, or None.
        traces_off: Why no traces are sent; empty where they are.
    """

    observer: Observers = NOBODY
    metrics: "MetricsServer | None" = None
    tracer: CallTracer | None = None
    traces_off: str = ""

    @property
    def metrics_port(self) -> int | None:
        """Port of the metrics; None if they are off."""
        return None if self.metrics is None else self.metrics.port

    def stop(self) -> None:
        """Close the port of the metrics and send the last spans. Waits, so not on an event loop."""
        if self.metrics is not None:
            self.metrics.stop()
        if self.tracer is not None:
            self.tracer.stop()


def open_telemetry(config: ServerConfig, engine: "Engine", trainers: "Trainers", log: Any) -> Telemetry:
    """Start the configured telemetry. Belongs to the server's event loop.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the port is taken, or traces are wanted without `trocar[otel]`.
    """
    members: list[CallObserver] = []
    tracer, traces_off = _tracer(config, log)
    if tracer is not None:
        members.append(tracer)
    try:
        metrics = _serve_metrics(config, engine, trainers, members)
    except BaseException:
        if tracer is not None:
            tracer.stop()
        raise
    if metrics is not None:
        log.info("metrics", address=f"{config.metrics_host}:{metrics.port}")
    return Telemetry(Observers(tuple(members)) if members else NOBODY, metrics, tracer, traces_off)


def _serve_metrics(
    config: ServerConfig, engine: "Engine", trainers: "Trainers", members: list[CallObserver]
) -> "MetricsServer | None":
    """Start the HTTP server of metrics, if configured, and add its observers of calls."""
    if config.metrics_port is None:
        return None
    from prometheus_client import make_wsgi_app

    from trocar_server.metrics_server import MetricsServer

    registry, observers = make_metrics(config, engine, trainers)
    members += observers
    return MetricsServer(make_wsgi_app(registry), config.metrics_host, config.metrics_port)


def make_metrics(
    config: ServerConfig, engine: "Engine", trainers: "Trainers"
) -> "tuple[CollectorRegistry, list[CallObserver]]":
    """Metrics of a server, and the observers that feed them."""
    from prometheus_client import CollectorRegistry, ProcessCollector

    from trocar_server.telemetry.call_metrics import CallMetrics
    from trocar_server.telemetry.labels import ModelLabels
    from trocar_server.telemetry.pass_metrics import PassMetrics
    from trocar_server.telemetry.snapshot import ServerState
    from trocar_server.telemetry.state_metrics import StateMetrics

    registry = CollectorRegistry()
    labels = ModelLabels(engine.catalogue.kind_of)
    state = ServerState(engine, trainers, config.data_dir.expanduser(), labels)
    ProcessCollector(registry=registry)
    registry.register(StateMetrics(state, _reader(state)))
    calls, passes = CallMetrics(labels), PassMetrics(labels)
    registry.register(calls.collector())
    registry.register(passes.collector())
    return registry, [calls, passes]


def _reader(state: "ServerState") -> "Callable[[], Snapshot]":
    """Thread-safe reader of the state; returns the last one if the event loop is busy for long."""
    loop = asyncio.get_running_loop()
    last = state.read()

    async def read() -> "Snapshot":
        return state.read()

    def from_elsewhere() -> "Snapshot":
        nonlocal last
        if loop.is_running():
            future = asyncio.run_coroutine_threadsafe(read(), loop)
            try:
                last = future.result(_READ_TIMEOUT_S)
            except LateError:
                future.cancel()
        return last

    return from_elsewhere


def _tracer(config: ServerConfig, log: Any) -> tuple[CallTracer | None, str]:
    """Return the tracer, or why no traces are sent."""
    endpoint = wanted_endpoint(config.otel_endpoint)
    if endpoint is None:
        return None, why_off(config.otel_endpoint)
    try:
        return open_tracer(endpoint), ""
    except ServiceError as error:
        if config.otel_endpoint is not None:
            raise
        log.warning("no traces", why=error.message)  # the environment is not always ours alone
        return None, error.message
