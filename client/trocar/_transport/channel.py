"""Channels to a server, for both clients: credentials, limits, retries."""

import asyncio
import json
import os
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar
from uuid import uuid4

import grpc
import grpc.aio
from grpc.experimental import ChannelOptions

from trocar._base.call_options import AS_CONNECTED, CallOptions, check_options, check_timeout
from trocar._transport.targets import addresses_of, certificate_host, listed_target
from trocar_api.versions import VERSION_KEY

AsyncInterrupts: tuple[type[BaseException], ...] = ()
Interrupts: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit)
"""What signals raise inside of a call, see Note: [Interrupted call]; asyncio cancels its task instead."""
_ENDED_WITHIN_S = 0.5
AsyncChannel: TypeAlias = grpc.aio.Channel
Channel: TypeAlias = grpc.Channel

if TYPE_CHECKING:
    Request = TypeVar("Request")
    Reply = TypeVar("Reply")
    Trailing: TypeAlias = Iterable[tuple[str, str | bytes]]
    AsyncMethod: TypeAlias = grpc.aio.UnaryUnaryMultiCallable[Request, Reply]
    AsyncUnaryStream: TypeAlias = grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
    AsyncStreamStream: TypeAlias = grpc.aio.StreamStreamMultiCallable[bytes, bytes]
    Method: TypeAlias = grpc.UnaryUnaryMultiCallable[Request, Reply]
    UnaryStream: TypeAlias = grpc.UnaryStreamMultiCallable[bytes, bytes]
    StreamStream: TypeAlias = grpc.StreamStreamMultiCallable[bytes, bytes]

Option: TypeAlias = tuple[str, str | int]

UNIX = "unix:"
"""How targets begin that are Unix sockets with a path."""

_HEALTH_OF = "trocar_api.v1.ExtractionService"

LOCAL = "local"
"""The target that stands for a server in this process."""

MAX_RETRIES = 4
"""gRPC makes at most five attempts, whatever its service config says."""

MAX_MESSAGE_BYTES = 16 << 20
"""The largest message that the client accepts; gRPC's own default is 4 MiB."""

RETRY_BUFFER_BYTES = 8 << 20
"""Above this a call is no longer retried by gRPC, whose own default is 256 KiB."""

MAX_METADATA_BYTES = 64 << 10
"""Room for long error messages, such as every mismatched key; gRPC's own default is 8 KiB."""


class AsyncStream(Protocol):
    """The messages of a reply, with asyncio."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over the messages."""
        ...

    async def trailing_metadata(self) -> "Trailing | None":
        """Return what the server sent at the end."""
        ...

    def cancel(self) -> bool:
        """End the call; without effect once it has ended."""
        ...


class Stream(Protocol):
    """The messages of a reply."""

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the messages."""
        ...

    def trailing_metadata(self) -> "Trailing | None":
        """Return what the server sent at the end."""
        ...

    def cancel(self) -> bool:
        """End the call; without effect once it has ended."""
        ...


@dataclass(frozen=True)
class TlsOptions:
    """TLS certificates and key; each as a path or as the PEM bytes themselves."""

    ca: str | os.PathLike[str] | bytes | None = None
    """Certificates to trust; the roots that gRPC brings along when None."""
    certificate: str | os.PathLike[str] | bytes | None = None
    """The client's own certificate chain, where the server asks for one (mTLS)."""
    key: str | os.PathLike[str] | bytes | None = None
    """The private key of `certificate`."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files and return gRPC's credentials.

        Raises:
            ValueError: Certificate or key is missing (of which gRPC 1.81 aborts), or a file is no PEM.
            FileNotFoundError: There is no such file.
        """
        if (self.certificate is None) != (self.key is None):
            missing, given = ("key", "certificate") if self.key is None else ("certificate", "key")
            raise ValueError(f"TlsOptions has a {given} and no {missing}; give both, or neither")
        return grpc.ssl_channel_credentials(
            root_certificates=_pem("ca", self.ca, "CERTIFICATE"),
            private_key=_pem("key", self.key, "PRIVATE KEY"),
            certificate_chain=_pem("certificate", self.certificate, "CERTIFICATE"),
        )


@dataclass(frozen=True)
class ConnectOptions:
    """Connection options; checked on construction.

    Raises:
        ValueError: A value is out of range, or a token would cross a network in plain text.
    """

    target: str
    """`host:port`, any gRPC target, or `local`."""
    timeout_s: float
    """Deadline of every call that names none, in seconds."""
    token: str | None
    """Sent as a bearer token."""
    tls: TlsOptions | bool | None
    """True for TLS with gRPC's roots."""
    retries: int
    """How often a call is tried again, 0 to 4."""
    shared_memory: bool | None = None
    """Whether large payloads go through shared memory; None: where the target is a Unix socket."""

    compression: Literal["gzip"] | None = None
    """What messages are compressed with, in both directions."""
    calls: CallOptions = AS_CONNECTED
    """The default of calls with tensors."""

    direct: bool = True
    """Whether replicas of a cluster are called directly where a gateway names them and they are reached."""
    is_member: bool = False
    """Whether this is one of several servers: if it has gone, others are called instead of waiting for it."""
    tls_name: str = ""
    """The name in the server's certificate, where it is not that of the target."""

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)
        check_options(self.calls)
        if self.compression not in (None, "gzip"):
            raise ValueError(f"compression={self.compression!r} is neither 'gzip' nor None")
        if not self.target.strip():
            raise ValueError("the address of the server is empty; write host:port")
        addresses_of(self.target)
        given: object = self.token
        if not isinstance(given, str | None):
            raise TypeError(f"token is {type(given).__name__}; give a text")
        if self.token and not (self.token.isascii() and self.token.isprintable()):
            raise ValueError(
                "the token has characters that a header cannot contain; check for a copied line end"
            )
        if not 0 <= self.retries <= MAX_RETRIES:
            raise ValueError(f"retries={self.retries} is not in the range 0 to {MAX_RETRIES}")
        if self.shared_memory and not (self.target == LOCAL or self.target.startswith(UNIX)):
            raise ValueError(f"shared memory needs a Unix socket, not {self.target!r}")
        if self.target == LOCAL and self.tls:
            raise ValueError(f"tls cannot be used with the target {LOCAL!r}, which needs no network")
        if self.token and not self.tls and not is_loopback(self.target):
            raise ValueError(f"a token to {self.target} would be sent in plain text; connect with tls=True")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The target of each server, where the target lists several."""
        return addresses_of(self.target)

    def __repr__(self) -> str:
        return f"{self.target!r}{', tls' if self.tls else ''}{', token' if self.token else ''}"

    @property
    def shares_memory(self) -> bool:
        """Whether shared memory is requested from the server."""
        return self.shared_memory is not False and not self.compression and self.target.startswith(UNIX)

    def metadata(self, request_id: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call."""
        headers = [("x-request-id", request_id), (VERSION_KEY, own_version())]
        if "opentelemetry.trace" in sys.modules:
            headers += trace_headers()
        if self.token:
            headers.append(("authorization", f"Bearer {self.token}"))
        if self.compression:
            headers.append(("x-reply-compression", self.compression))
        return tuple(headers)


def open_async_channel(options: ConnectOptions) -> AsyncChannel:
    """Open a channel of the asyncio API; connecting happens with the first call.

    Raises:
        ValueError: No event loop is there to which it could belong.
    """
    target = _grpc_target(options)
    try:
        if options.tls:
            return grpc.aio.secure_channel(
                target, _credentials(options.tls), channel_options(options), _compression(options)
            )
        return grpc.aio.insecure_channel(target, channel_options(options), _compression(options))
    except RuntimeError:  # asyncio's, in gRPC
        raise ValueError(
            "no event loop runs here: call `trocar.aio.connect` in a coroutine, such as that of `asyncio.run`"
        ) from None


def async_loop_check(channel: object) -> Callable[[], bool]:
    """Return whether another event loop runs than the one of a channel of grpc.aio, as a function."""
    own = getattr(channel, "_loop", None)  # grpc (1.81) chooses it, also where none runs
    return lambda: own is not None and asyncio.get_running_loop() is not own


def loop_check(channel: object) -> Callable[[], bool]:
    """Return False, as a function: a channel without an event loop can be used in any."""
    del channel
    return bool


def open_channel(options: ConnectOptions) -> Channel:
    """Open a channel; connecting happens with the first call."""
    # The calling thread reads the replies itself: without it another thread does, and hands each over (0.9
    # against 1.1 ms a call, 1.0 against 3.7 ms for the slowest tenth).
    chosen = [*channel_options(options), (ChannelOptions.SingleThreadedUnaryStream, 1)]
    target = _grpc_target(options)
    if options.tls:
        return grpc.secure_channel(target, _credentials(options.tls), chosen, _compression(options))
    return grpc.insecure_channel(target, chosen, _compression(options))


# Note: [Interrupted call]
# grpcio 1.81 holds its locks by `threading.Condition`, whose `__enter__` and `__exit__` are Python: Ctrl-C
# between them and the `with` leaves a lock held for ever, by the thread that was interrupted. That thread may
# take it again, but gRPC's own threads wait for it, and with them every stream. Nothing tells whether it is
# so: after an interrupted call the client uses another channel, which shares the connection of the old one.
# An interrupt between the moment when gRPC starts a call and the one when it returns it leaves nothing to
# cancel: the server completes that call, and its end on the old channel is not read.


def retire(channel: Any, after_s: float) -> None:
    """Close a channel some seconds later, when the calls of other threads on it have ended."""

    def close() -> None:
        time.sleep(after_s)
        channel.close()

    if not sys.is_finalizing():  # see `end_call`
        _aside(close)


def end_call(call: Any) -> None:
    """Cancel a call, in a thread that may wait for gRPC's locks without end; returns when it is, or soon.

    Not while the interpreter ends: no thread can start then, and `Thread.start` would never return (Python
    3.11). A stream in an error's traceback is collected only then.
    """
    if not sys.is_finalizing():
        _aside(call.cancel).join(_ENDED_WITHIN_S)


def _aside(end: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=end, name="trocar-grpc-end", daemon=True)
    thread.start()
    return thread


def _grpc_target(options: ConnectOptions) -> str:
    return listed_target(options.addresses) if options.addresses else options.target


def async_begun(method: "AsyncMethod[Request, Reply]", request: "Request", **options: Any) -> Any:
    """Begin a call of one message each way, with asyncio; `async_answer` waits for its reply."""
    return method(request, **options)


async def async_answer(call: Any) -> "tuple[Any, Trailing]":
    """Return the reply of a call that was begun, and its trailing metadata."""
    return await call, await call.trailing_metadata() or ()


def begun(method: "Method[Request, Reply]", request: "Request", **options: Any) -> Any:
    """Make a call of one message each way."""
    return method.with_call(request, **options)


def answer(call: Any) -> "tuple[Any, Trailing]":
    """Return the reply of a call that was made, and its trailing metadata."""
    reply, ended = call
    return reply, ended.trailing_metadata() or ()


def trace_headers() -> tuple[tuple[str, str], ...]:
    """Return `traceparent`, and `tracestate` where there is one, of the span that is active now.

    Only if the program uses OpenTelemetry itself. It is not imported here: without an import there is no
    active span.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None or not hasattr(trace, "get_current_span"):  # no tracing, or it is being imported
        return ()
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ()
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags) & 0xFF:02x}"
    state = context.trace_state.to_header() if context.trace_state else ""
    headers = (("traceparent", parent),)
    return (*headers, ("tracestate", state)) if state else headers


@cache
def own_version() -> str:
    """Return the client's version; looked up with the first call: that takes 20 ms."""
    from importlib.metadata import version

    return version("trocar")


def new_request_id() -> str:
    """Return the id of one call, which the server's log has, too."""
    return uuid4().hex


def is_loopback(target: str) -> bool:
    """Whether a target is this machine: loopback address, `localhost`, Unix socket or `local`."""
    if target == LOCAL or target.startswith(("unix:", "unix-abstract:")):
        return True
    address = target.removeprefix("ipv4:").removeprefix("ipv6:").removeprefix("dns:").lstrip("/")
    if "," in address:
        return all(is_loopback(part) for part in address.split(","))
    host = address[1:].partition("]")[0] if address.startswith("[") else address.partition(":")[0]
    octets = host.split(".")
    is_ipv4_loopback = octets[0] == "127" and len(octets) == 4 and all(part.isdigit() for part in octets)
    return host in ("localhost", "::1") or is_ipv4_loopback


def channel_options(options: ConnectOptions) -> list[Option]:
    """Return gRPC's channel options.

    Only `UNAVAILABLE` is retried: then the call reached no handler, and every call of this client
    may be repeated anyway. gRPC drops the retry silently where a request outgrows the buffer. Calls that
    carry tensors are not retried by gRPC.
    """
    chosen: list[Option] = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5000),
        # A stream may be silent for long; a dead peer is detected while a call is in flight.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    if options.retries:
        chosen.append(("grpc.per_rpc_retry_buffer_size", RETRY_BUFFER_BYTES))
    config = _service_config(options)
    if config:
        chosen.append(("grpc.service_config", json.dumps(config)))
    # One name for all of a list: gRPC checks certificates against the target's.
    tls_name = options.tls_name or (certificate_host(options.addresses) if options.addresses else "")
    if tls_name and options.tls:
        chosen.append(("grpc.ssl_target_name_override", tls_name))
    if is_loopback(options.target):
        chosen.append(("grpc.enable_http_proxy", 0))
    return chosen


def _service_config(options: ConnectOptions) -> dict[str, object]:
    """Return gRPC's service config: retries, and for several servers each in its turn while it serves."""
    config: dict[str, object] = {"methodConfig": _method_config(options.retries)} if options.retries else {}
    if options.addresses or options.target.startswith("dns:"):
        config["loadBalancingConfig"] = [{"round_robin": {}}]
        config["healthCheckConfig"] = {"serviceName": _HEALTH_OF}
    return config


def _method_config(retries: int) -> list[dict[str, object]]:
    policy = {
        "maxAttempts": retries + 1,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    # Calls of several messages are retried by the client itself, see `_transport.attempts`.
    own_retries = (
        ("ExtractionService", "Extract"),
        ("StreamService", "ExtractStream"),
        ("DatasetService", "UploadShard"),
        ("TrainerService", "Train"),
        ("SharedMemoryService", "ShareMemory"),
        ("PreparedCallService", "PrepareCalls"),
    )
    unretried: dict[str, object] = {
        "name": [{"service": f"trocar_api.v1.{service}", "method": name} for service, name in own_retries]
    }
    return [{"name": [{}], "retryPolicy": policy}, unretried]


def _compression(options: ConnectOptions) -> grpc.Compression | None:
    return grpc.Compression.Gzip if options.compression else None


def _credentials(tls: TlsOptions | bool) -> grpc.ChannelCredentials:
    return (tls if isinstance(tls, TlsOptions) else TlsOptions()).credentials()


def _pem(name: str, source: str | os.PathLike[str] | bytes | None, kind: str) -> bytes | None:
    """Return PEM bytes of a kind.

    Raises:
        ValueError: They hold something else.
    """
    if source is None:
        return None
    content = source if isinstance(source, bytes) else Path(source).read_bytes()
    if f"{kind}-----".encode() not in content:
        where = "the bytes" if isinstance(source, bytes) else str(source)
        match = re.search(rb"-----BEGIN ([A-Z ]+)-----", content)
        what = (
            f"a {match[1].decode().lower()}"
            if match
            else "no PEM; openssl x509 -inform der -in FILE converts it"
        )
        raise ValueError(f"{name} of TlsOptions: {where} should hold a {kind.lower()} in PEM, and is {what}")
    return content
