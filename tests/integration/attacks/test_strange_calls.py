"""Calls that no client of ours makes: without a message, with two, of strangers, cancelled, garbage."""

import logging
import socket
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from structlog.testing import capture_logs

from tests.support.files.log_records import log_records
from tests.support.models.gated_models import WAIT_S
from tests.support.models.odd_models import Identity
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve, custom
from tests.support.wire.methods import HEALTH, OPEN_INFERENCE, OWN, Method
from tests.support.wire.wire import raw_channel
from trocar_server.rpc.call.running_calls import MAX_OPEN_CALLS

MODELS = {"identity": custom(Identity)}
WITH_ONE = [method for method in (*OWN, *OPEN_INFERENCE, *HEALTH) if not method.streams_requests]
STRANGE_HEALTH = [
    *(method.path for method in HEALTH),
    "/grpc.health.v1.Health/List",
    "/grpc.health.v1.Health/Absent",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/trocar_api.v1.ServerService/GetServerInfo",
    "/trocar_api.v1.ServerService/Absent",
    "/absent.Service/Absent",
]
GARBAGE = [b"", b"\xff\xff\xff", b"\x0a\x03abc", b"\x1f\x8babc"]
WATCH = "/grpc.health.v1.Health/Watch"
CHECK = "/grpc.health.v1.Health/Check"


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with running_server(models=MODELS, device="cpu", reflection=True) as server:
        yield server


def status(channel: grpc.Channel, path: str, *messages: bytes, **options: Any) -> grpc.StatusCode:
    """Make a call of any number of messages, whatever the method takes, and return how it ended."""
    method: Any = channel.stream_stream(path, None, None)
    call = method(iter(messages), **{"timeout": WAIT_S, **options})
    with suppress(grpc.RpcError):
        list(call)
    found: grpc.StatusCode = call.code()
    return found


@pytest.mark.parametrize("method", WITH_ONE, ids=lambda method: method.path)
def test_a_call_without_a_message_is_refused(running: RunningServer, method: Method) -> None:
    with raw_channel(running.address) as channel:
        assert status(channel, method.path) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", WITH_ONE, ids=lambda method: method.path)
def test_a_call_with_two_messages_is_refused(running: RunningServer, method: Method) -> None:
    with raw_channel(running.address) as channel:
        assert status(channel, method.path, b"", b"") is grpc.StatusCode.INVALID_ARGUMENT


def test_a_call_whose_message_does_not_come_is_ended(serve: Serve) -> None:
    running = serve(models=MODELS, limits={"stall_timeout_s": 0.5})
    with raw_channel(running.address) as channel:
        method: Any = channel.stream_stream("/trocar_api.v1.ServerService/GetServerInfo", None, None)
        silent: Iterator[bytes] = iter(socket_never, None)
        call = method(silent, timeout=WAIT_S)
        with pytest.raises(grpc.RpcError, match="too little of the request"):
            list(call)
    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def unfinished(channel: grpc.Channel, path: str, message: bytes) -> tuple[grpc.StatusCode, str]:
    """Send the one message of a call and no end; return how the server ended it."""
    method: Any = channel.stream_stream(path, None, None)
    messages: SimpleQueue[bytes | None] = SimpleQueue()
    messages.put(message)
    call = method(iter(messages.get, None), timeout=WAIT_S)
    with suppress(grpc.RpcError):
        list(call)
    messages.put(None)
    return call.code(), call.details()


def test_a_call_that_does_not_end_after_its_message_is_not_held_for_long(serve: Serve) -> None:
    running = serve(models=MODELS, limits={"receive_timeout_s": 0.5})
    with raw_channel(running.address) as channel:
        code, text = unfinished(channel, "/trocar_api.v1.ServerService/GetServerInfo", b"")
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "0.5 s" in text


@pytest.mark.parametrize(
    ("path", "byte_count"),
    [
        (CHECK, (1 << 10) + 1),
        ("/trocar_api.v1.ServerService/GetServerInfo", (16 << 20) + 1),
        ("/trocar_api.v1.ExtractionService/Plan", (16 << 20) + 1),
        ("/inference.GRPCInferenceService/ServerLive", (16 << 20) + 1),
    ],
)
def test_a_message_over_its_limit_is_refused_before_the_call_ends(
    serve: Serve, path: str, byte_count: int
) -> None:
    running = serve(models=MODELS)
    with raw_channel(running.address, max_send_message_length=-1) as channel:
        code, text = unfinished(channel, path, bytes(byte_count))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"{byte_count:,} bytes" in text


def socket_never() -> bytes:
    """Wait for what nobody sends, until the channel's thread goes."""
    one, other = socket.socketpair()
    with one, other:
        one.settimeout(5)
        with suppress(TimeoutError):
            one.recv(1)
    raise StopIteration


@pytest.mark.parametrize("is_guarded", [False, True])
def test_no_call_of_a_stranger_leaves_a_traceback(serve: Serve, is_guarded: bool) -> None:
    """On the main port and on that for health, with and without a wrong token; also when it is cancelled."""
    with capture_logs() as lines, log_records(logging.ERROR) as records:
        running = serve(models=MODELS, tokens=is_guarded, health_port=0, reflection=True, metrics_port=0)
        for address in (running.address, f"127.0.0.1:{running.app.rpc.health_port}"):
            with raw_channel(address) as channel:
                _strange_calls(channel)
                assert status(channel, CHECK, b"") is grpc.StatusCode.OK
    assert not [line for line in lines if line["log_level"] in ("error", "critical")]
    assert records == []


def _strange_calls(channel: grpc.Channel) -> None:
    for path in STRANGE_HEALTH:
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            for message in GARBAGE:
                status(channel, path, message, timeout=0.2, metadata=metadata)
        for message in (b"", b"\x0a\x03abc"):
            for _ in range(30):
                method: Any = channel.unary_stream(path, None, None)
                method(message).cancel()


def test_strangers_cannot_fill_the_log(serve: Serve) -> None:
    with capture_logs() as lines:
        running = serve(models=MODELS, tokens=True)
        with raw_channel(running.address) as channel:
            for _ in range(1500):
                call: Any = channel.unary_unary("/trocar_api.v1.ServerService/GetServerInfo", None, None)
                assert call.future(b"", timeout=WAIT_S).code() is grpc.StatusCode.UNAUTHENTICATED
            for _ in range(1500):
                status(channel, "/grpc.health.v1.Health/List", b"")
    assert len(lines) < 1500
    assert sum(line["event"] == "call" for line in lines) >= 500


def test_those_who_watch_do_not_keep_others_from_asking(serve: Serve) -> None:
    """Whoever opens many watches ends his own oldest; another's stays, and checks are answered."""
    running = serve(models=MODELS, health_port=0)
    for address in (running.address, f"127.0.0.1:{running.app.rpc.health_port}"):
        own = {"use_local_subchannel_pool": 1}
        with raw_channel(address, **own) as many, raw_channel(address, **own) as other:
            kept = watch(other)
            watched = [watch(many) for _ in range(MAX_OPEN_CALLS + 20)]
            assert status(other, CHECK, b"") is grpc.StatusCode.OK
            with pytest.raises(grpc.RpcError):
                next(watched[0])
            assert watched[0].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert kept.is_active()
            assert watched[-1].is_active()


def watch(channel: grpc.Channel) -> Any:
    method: Any = channel.unary_stream(WATCH, None, None)
    call = method(b"", timeout=WAIT_S)
    assert health_pb2.HealthCheckResponse.FromString(next(call)).status == 1
    return call


def test_one_who_stops_watching_leaves_the_others_watching(serve: Serve) -> None:
    running = serve(models=MODELS)
    with raw_channel(running.address) as channel:
        first, second = watch(channel), watch(channel)
        first.cancel()
        with suppress(grpc.RpcError):
            next(first)
        running.run(lambda: running.app.rpc.set_serving(False))
        assert health_pb2.HealthCheckResponse.FromString(next(second)).status == 2
