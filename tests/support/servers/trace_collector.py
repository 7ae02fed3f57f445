"""A collector of traces: the spans that came over the wire, as OpenTelemetry's own stubs read them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    requests: list[Any] = field(default_factory=list)
    endpoint: str = ""

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self) -> list[Any]:
        """Return all spans, in the order of their start."""
        found = [
            span
            for request in self.requests
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def resource(self) -> dict[str, str]:
        """Return what the sender says of itself."""
        of_resource = self.requests[0].resource_spans[0].resource
        return {entry.key: entry.value.string_value for entry in of_resource.attributes}


@contextmanager
def collector() -> Iterator[Collector]:
    """Listen on a free port of the loopback interface."""
    taking = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # has no annotations
    add(taking, server)
    taking.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield taking
    finally:
        server.stop(None).wait()
