"""HTTP server for Prometheus, small, with its own threads."""

import socket
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError


class MetricsServer:
    """Answers every GET with the metrics, until it is stopped.

    server = MetricsServer(make_wsgi_app(registry), "127.0.0.1", 9464)
    server.port
    server.stop()

    Args:
        app: WSGI application that returns the metrics.
        host: Address to listen on.
        port: TCP port; 0 takes a free one.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the address cannot be used.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]], host: str, port: int) -> None:
        kind = _IPv6Server if ":" in host else _Server
        try:
            self._http = make_server(host, port, app, kind, handler_class=_MetricsHandler)
        except OSError as error:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another metrics_port, or "
                "metrics_host",
            ) from None
        self.port = int(self._http.server_port)
        self._thread = Thread(target=self._http.serve_forever, args=(0.05,), name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the port and wait for the thread; requests under way may be cut off."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each request, so that a slow reader delays no other."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without a DNS lookup of our own name, which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class _MetricsHandler(WSGIRequestHandler):
    timeout = 10
    """Seconds after which a connection that sends nothing is closed."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: scrapes are not calls."""
