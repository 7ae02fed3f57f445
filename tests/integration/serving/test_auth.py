"""Tokens over the wire: every method of every service, with every kind of token that does not do."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

import trocar
from tests.support.models.odd_models import Identity
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve, custom
from tests.support.wire.methods import GUARDED, OWN, Method, needed_scope
from tests.support.wire.wire import raw_channel
from trocar_server.auth import Scope, TokenFile, live_grants, with_included
from trocar_server.rpc.oip.service import NOT_OFFERED

MODELS = {"identity": custom(Identity)}
ROW = np.zeros((1, 3), np.float32)
WRONG = "trocar_" + "A" * 43
BAD_HEADERS = {
    "no token": [],
    "an empty token": ["Bearer "],
    "another scheme": ["Basic {token}"],
    "no scheme": ["{token}"],
}
BAD_TOKENS = [
    "wrong",
    "expired",
    "revoked",
    "cut off",
    "longer",
    "other case",
    "hash",
    "quoted",
    "another server",
]

NOT_LET_IN = (
    *(grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED),
    *(grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL),
)
"""What a call that was let in does not end with, though its empty request may be wrong."""

methods = pytest.mark.parametrize("method", GUARDED, ids=lambda method: method.path)


def make(file: TokenFile, name: str, *scopes: Scope, lifetime_s: int = 3600) -> str:
    now_s = time.time()
    _, token = file.add(name, scopes, expires_at_s=int(now_s) + lifetime_s, now_s=now_s)
    assert token is not None
    return token


class Guarded:
    """A server that wants tokens, and tokens of all kinds."""

    def __init__(self, running: RunningServer, data_dir: Path, elsewhere: Path) -> None:
        self.running = running
        self.address = running.address
        self.file = TokenFile(data_dir)
        self.tokens = {scope.value: self.make(scope.value, scope) for scope in Scope}
        full = self.make("full", *Scope)
        self.tokens |= {"full": full, "expired": self.make("late", *Scope, lifetime_s=0)}
        self.tokens["revoked"] = self.make("gone", *Scope)
        self.file.revoke("gone")
        self.tokens |= {"wrong": WRONG, "cut off": full[:-1], "longer": full + "A", "quoted": f'"{full}"'}
        self.tokens["other case"] = full.swapcase()
        self.tokens["hash"] = next(str(g.token_sha256) for g in self.file.read() if g.name == "full")
        self.tokens["another server"] = make(TokenFile(elsewhere), "full", *Scope)

    def make(self, name: str, *scopes: Scope, lifetime_s: int = 3600) -> str:
        return make(self.file, name, *scopes, lifetime_s=lifetime_s)

    def headers(self, kind: str) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {self.tokens[kind]}")]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    data_dir, elsewhere = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("elsewhere")
    settings: dict[str, Any] = {"models": MODELS, "data_dir": data_dir, "tokens": True, "reflection": True}
    with (
        pytest.MonkeyPatch.context() as patch,
        capture_logs(),
        running_server(device="cpu", **settings) as running,
    ):
        patch.setattr(live_grants, "CHECK_EVERY_S", 0.0)  # each call has a look: no test waits
        yield Guarded(running, data_dir, elsewhere)


@pytest.fixture(scope="module")
def channel(guarded: Guarded) -> Iterator[grpc.Channel]:
    with raw_channel(guarded.address) as opened:
        yield opened


def reason_of(call: Any) -> str:
    info = ErrorInfo()
    details = dict(call.trailing_metadata())["grpc-status-details-bin"]
    assert any(detail.Unpack(info) for detail in Status.FromString(details).details)
    return str(info.reason)


@methods
@pytest.mark.parametrize("headers", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_no_method_answers_without_a_token(
    guarded: Guarded, channel: grpc.Channel, method: Method, headers: list[str]
) -> None:
    metadata = [("authorization", value.format(token=guarded.tokens["full"])) for value in headers]
    call = method.call(channel, metadata=metadata)
    assert (call.code(), reason_of(call)) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_MISSING")


@methods
def test_no_method_answers_a_token_that_is_not_valid_and_all_are_told_the_same(
    guarded: Guarded, channel: grpc.Channel, method: Method
) -> None:
    texts = set()
    for kind in BAD_TOKENS:
        call = method.call(channel, metadata=guarded.headers(kind))
        assert (call.code(), reason_of(call)) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_INVALID"), kind
        texts.add(call.details())
    assert len(texts) == 1


def test_callers_without_the_scope_admin_see_themselves_alone_in_the_status(guarded: Guarded) -> None:
    def status_of(kind: str) -> trocar.ServerStatus:
        with trocar.connect(guarded.address, token=guarded.tokens[kind]) as client:
            return client.status()

    for kind in ("run", "full"):
        with trocar.connect(guarded.address, token=guarded.tokens[kind]) as client:
            client.extract("identity", ROW, "identity")
    assert {"run", "full"} <= {one.caller for one in status_of("admin").callers}
    own = status_of("run")
    assert [one.caller for one in own.callers] == ["run"]
    assert own.callers[0].used_s > 0
    assert [queue.model_id for queue in own.queues] == ["identity"]
    assert (own.caches, own.total.used_s, own.device.user) == ((), 0, "")


@methods
@pytest.mark.parametrize("scope", Scope)
def test_a_token_opens_the_methods_of_its_scope_and_no_others(
    guarded: Guarded, channel: grpc.Channel, method: Method, scope: Scope
) -> None:
    call = method.call(channel, metadata=guarded.headers(scope))
    if needed_scope(method) not in with_included([scope]):
        assert (call.code(), reason_of(call)) == (grpc.StatusCode.PERMISSION_DENIED, "SCOPE_MISSING")
        assert needed_scope(method) in call.details()
    elif method.name in NOT_OFFERED:
        assert (call.code(), reason_of(call)) == (grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED")
    else:
        assert call.code() not in NOT_LET_IN


STREAMS = [method for method in GUARDED if method.streams_requests]
REFUSED_STREAMS = [
    *((method, "wrong", grpc.StatusCode.UNAUTHENTICATED) for method in STREAMS),
    *((m, "read", grpc.StatusCode.PERMISSION_DENIED) for m in STREAMS if needed_scope(m) != "read"),
]


@pytest.mark.parametrize(("method", "kind", "expected"), REFUSED_STREAMS)
def test_a_stream_is_refused_before_its_first_message(
    guarded: Guarded, channel: grpc.Channel, method: Method, kind: str, expected: grpc.StatusCode
) -> None:
    silent = threading.Event()

    def messages() -> Iterator[bytes]:
        silent.wait(60)
        yield b""

    try:
        call = method.call(channel, messages(), metadata=guarded.headers(kind))
        assert call.code() is expected
        assert not silent.is_set()
    finally:
        silent.set()


@pytest.mark.parametrize("method", OWN, ids=lambda method: method.path)
@pytest.mark.parametrize("message", [b"\xff" * 64, bytes(32 << 20)], ids=["no message", "32 MiB"])
def test_what_a_stranger_sends_is_not_looked_at(guarded: Guarded, method: Method, message: bytes) -> None:
    """Otherwise it would be INVALID_ARGUMENT or RESOURCE_EXHAUSTED."""
    with raw_channel(guarded.address, max_send_message_length=-1) as channel:
        call = method.call(channel, [message], metadata=guarded.headers("wrong"))
        assert call.code() is grpc.StatusCode.UNAUTHENTICATED


def test_health_is_open_to_everybody(channel: grpc.Channel, guarded: Guarded) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    for metadata in ([], guarded.headers("wrong")):
        reply = stub.Check(health_pb2.HealthCheckRequest(), metadata=metadata)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(), metadata=metadata, timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


@pytest.mark.parametrize(
    ("kind", "expected", "details"),
    [
        ("wrong", trocar.errors.TokenInvalidError, {}),
        ("train", trocar.errors.ScopeMissingError, {"scope": "run", "principal": "train"}),
    ],
)
def test_the_client_raises_what_it_is(
    guarded: Guarded, kind: str, expected: type[trocar.errors.PermissionDeniedError], details: dict[str, str]
) -> None:
    with (
        trocar.connect(guarded.address, token=guarded.tokens[kind]) as client,
        pytest.raises(expected) as caught,
    ):
        client.extract("identity", ROW, "identity")
    assert caught.value.details == details
    assert guarded.tokens[kind] not in f"{caught.value!r} {caught.value.details}"


def test_without_a_token_the_client_is_told_how_to_send_one(guarded: Guarded) -> None:
    with (
        trocar.connect(guarded.address) as client,
        pytest.raises(trocar.errors.TokenMissingError, match="token="),
    ):
        client.models()


def test_a_right_token_computes(guarded: Guarded) -> None:
    with trocar.connect(guarded.address, token=guarded.tokens["run"]) as client:
        assert client.extract("identity", ROW, "identity")["identity"].shape == (1, 3)
        with pytest.raises(trocar.errors.ScopeMissingError, match="admin"):
            client.unload("identity")


def test_tokens_are_made_and_revoked_while_the_server_runs(guarded: Guarded) -> None:
    old = guarded.make("carol", Scope.READ)
    with trocar.connect(guarded.address, token=old) as first:
        assert [model.model_id for model in first.models()] == ["identity"]
        new = guarded.make("carol", Scope.READ)
        with trocar.connect(guarded.address, token=new) as second:
            assert first.models() == second.models()
            guarded.file.revoke(old)
            with pytest.raises(trocar.errors.TokenInvalidError):
                first.models()
            assert [model.model_id for model in second.models()] == ["identity"]


def test_what_is_stored_belongs_to_the_name_and_not_to_the_token(guarded: Guarded) -> None:
    tokens = [guarded.make(name, Scope.RUN) for name in ("dora", "dora", "emil")]
    edits = [trocar.edit("identity", "zero")]
    with trocar.connect(guarded.address, token=tokens[0]) as client:
        client.store_edits("identity", "mine", edits)
    found = []
    for token in tokens:
        with trocar.connect(guarded.address, token=token) as client:
            found.append([stored.name for stored in client.stored_edits()])
    assert found == [["mine"], ["mine"], []]


def test_a_damaged_file_lets_nobody_in_until_it_is_put_right(guarded: Guarded) -> None:
    content = guarded.file.path.read_bytes()
    with trocar.connect(guarded.address, token=guarded.tokens["full"]) as client:
        client.models()
        guarded.file.path.write_bytes(content[:-9])
        with pytest.raises(trocar.errors.TokenInvalidError):
            client.models()
        guarded.file.path.write_bytes(content)
        client.models()


def test_no_token_is_logged_and_each_line_has_its_principal(serve: Serve, tmp_path: Path) -> None:
    token = make(TokenFile(tmp_path), "frida", Scope.READ)
    with capture_logs() as lines:
        running = serve(models=MODELS, data_dir=tmp_path, tokens=True)
        for sent in (token, WRONG):
            with trocar.connect(running.address, token=sent) as client:
                for call in (client.models, lambda client=client: client.unload("identity")):
                    with suppress(trocar.errors.PermissionDeniedError):
                        call()
        running.run(_written)
    calls = [(line["code"], line["principal"]) for line in lines if line["event"] == "call"]
    assert calls[-4:] == [  # lines of an earlier test's server may come before
        ("OK", "frida"),
        ("PERMISSION_DENIED", "frida"),
        ("UNAUTHENTICATED", "-"),
        ("UNAUTHENTICATED", "-"),
    ]
    assert token not in str(lines)
    assert WRONG not in str(lines)


async def _written() -> None:
    """Let the loop write the lines that wait."""
