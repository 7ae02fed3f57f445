"""Callers who lose their rights in the middle of a call, and clients of other versions."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.support.models.gated_models import WAIT_S, Gate, Gated
from tests.support.models.odd_models import Identity
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve, custom
from tests.support.wire.wire import raw_channel
from trocar._transport import channel
from trocar._transport.rpc_errors import error_from_rpc
from trocar_server.auth import Scope, TokenFile, live_grants
from trocar_server.rpc.call import running_calls

ROW = np.zeros((1, 3), np.float32)


class Guarded:
    """A server that wants tokens."""

    def __init__(self, running: RunningServer, data_dir: Path) -> None:
        self.running, self.file = running, TokenFile(data_dir)

    def connect(self, name: str, *scopes: Scope, lifetime_s: int = 3600) -> trocar.Client:
        now_s = time.time()
        _, token = self.file.add(name, scopes, expires_at_s=int(now_s) + lifetime_s, now_s=now_s)
        return trocar.connect(self.running.address, token=token, retries=0)

    def check(self) -> int:
        async def check() -> int:
            return self.running.app.rpc.running.check()

        return self.running.run(check)


@pytest.fixture
def guarded(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Guarded:
    monkeypatch.setattr(live_grants, "CHECK_EVERY_S", 0.0)
    monkeypatch.setattr(running_calls, "CHECK_EVERY_S", 3600.0)  # the tests look themselves
    models = {"identity": custom(Identity), "gated": custom(Gated)}
    return Guarded(serve(models=models, data_dir=tmp_path, tokens=True), tmp_path)


class Held:
    """A call that is in the middle of its pass."""

    def __init__(self, client: trocar.Client, gate: Gate) -> None:
        self.outcome: list[Any] = []
        self._client = client
        gate.hold()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert gate.entered.wait(WAIT_S)

    def _run(self) -> None:
        try:
            self.outcome.append(self._client.extract("gated", ROW, "last/in"))
        except trocar.TrocarError as error:
            self.outcome.append(error)

    def result(self) -> Any:
        self._thread.join(WAIT_S)
        return self.outcome[0]


def test_a_call_ends_when_its_token_is_revoked(guarded: Guarded, gate: Gate) -> None:
    with guarded.connect("alice", Scope.RUN) as client:
        held = Held(client, gate)
        assert guarded.check() == 0
        guarded.file.revoke("alice")
        assert guarded.check() == 1
        assert guarded.check() == 0
        assert isinstance(held.result(), trocar.errors.TokenInvalidError)
        assert gate.left.wait(WAIT_S)
        assert gate.was_aborted  # the pass, too


def test_a_call_ends_when_its_token_expires(
    guarded: Guarded, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with guarded.connect("alice", Scope.RUN) as client:
        held = Held(client, gate)
        later = time.time() + 7200
        token_authorizer: Any = guarded.running.app.lifecycle.authorizer.current
        monkeypatch.setattr(token_authorizer.grants, "_now", lambda: later)
        assert guarded.check() == 1
        assert isinstance(held.result(), trocar.errors.TokenInvalidError)


def test_other_callers_go_on(guarded: Guarded, gate: Gate) -> None:
    with guarded.connect("alice", Scope.RUN) as alice, guarded.connect("bob", Scope.RUN):
        held = Held(alice, gate)
        guarded.file.revoke("bob")
        assert guarded.check() == 0
        gate.release()
        assert np.array_equal(held.result()["last/in"], ROW)


def test_a_stream_ends_between_two_batches(guarded: Guarded) -> None:
    with guarded.connect("alice", Scope.RUN) as client:
        first = threading.Event()

        def batches() -> Iterator[np.ndarray[Any, Any]]:
            yield ROW
            assert first.wait(WAIT_S)
            guarded.file.revoke("alice")
            assert guarded.check() == 1

        stream = client.extract_stream("identity", batches(), taps="identity")
        assert np.array_equal(next(iter(stream)).unwrap()["identity"], ROW)
        first.set()
        with pytest.raises(trocar.errors.TokenInvalidError):
            next(iter(stream))


def test_the_server_looks_by_itself(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    monkeypatch.setattr(live_grants, "CHECK_EVERY_S", 0.0)
    monkeypatch.setattr(running_calls, "CHECK_EVERY_S", 0.001)
    guarded = Guarded(serve(models={"gated": custom(Gated)}, data_dir=tmp_path, tokens=True), tmp_path)
    with guarded.connect("alice", Scope.RUN) as client:
        held = Held(client, gate)
        guarded.file.revoke("alice")
        assert isinstance(held.result(), trocar.errors.TokenInvalidError)


def teleported(address: str) -> Any:
    """Call a method that no server has, and return how it was refused."""
    with raw_channel(address) as channel:
        call: Any = channel.unary_unary("/trocar_api.v1.ServerService/Teleport", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=WAIT_S)
        return caught.value


# --- Versions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.99.0", "1.0.0"])
def test_a_newer_client_is_told_which_versions_there_are(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(channel, "own_version", lambda: version)
    with (
        trocar.connect(server.address, retries=0) as client,
        pytest.raises(trocar.VersionSkewError) as caught,
    ):
        client.models()
    error = caught.value
    assert error.reason == "VERSION_SKEW"
    assert error.details["client_version"] == version
    assert f"of version {version}" in str(error)
    assert f"trocar=={error.details['server_version']}" in str(error)


@pytest.mark.parametrize("version", ["0.1.99", "0.0.3", "nonsense"])
def test_an_older_client_a_later_patch_and_an_unknown_one_are_served(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(channel, "own_version", lambda: version)
    with trocar.connect(server.address) as client:
        assert client.models()


def test_a_method_that_the_server_does_not_have_is_explained(server: RunningServer) -> None:
    refusal = teleported(server.address)
    assert refusal.code() is grpc.StatusCode.UNIMPLEMENTED
    error = error_from_rpc(refusal)
    assert isinstance(error, trocar.errors.UnknownMethodError)
    assert "has no Teleport" in str(error)
    assert "this client is of version" in str(error)


def test_strangers_learn_no_version_from_methods_that_are_not_there(guarded: Guarded) -> None:
    assert teleported(guarded.running.address).code() is grpc.StatusCode.UNAUTHENTICATED
