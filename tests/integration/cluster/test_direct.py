"""Clients of a gateway that call its replicas directly, and return to it if a replica fails."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np
import pytest

import trocar
from tests.support.servers.certificates import OPENSSL, Certificate, authority, signed
from tests.support.servers.gateway import KEY, Gateway, is_serving, replica_id
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import tiny_models_config
from tests.support.servers.waiting import wait_until
from tests.support.wire.wire import raw_channel
from trocar._wire.replies import ReplyAssembler
from trocar.errors import ScopeMissingError, ServerUnavailableError
from trocar_api.v1.model_pb2 import ListReplicasRequest, ListReplicasResponse
from trocar_api.v1.model_pb2_grpc import ModelServiceStub
from trocar_server.auth import Scope, TokenFile
from trocar_server.rpc.call.forwarded import GatewayAccess

IMAGES = np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32)
NAMES = ("plain",)
LABELS = np.array([0, 1, 2, 3])
MODELS = {model_id: tiny_models_config()[model_id] for model_id in NAMES}
Pair = tuple[RunningServer, RunningServer]


@contextmanager
def replica(**settings: Any) -> Iterator[RunningServer]:
    """Start a server that knows that it is a replica of `plain`."""
    with running_server(models=MODELS, device="cpu", **settings) as server:
        server.run(lambda: server.app.lifecycle.identify(replica_id(server, "plain")))
        yield server


@pytest.fixture(scope="module")
def servers() -> Iterator[Pair]:
    with replica() as one, replica() as two:
        yield one, two


@contextmanager
def gateway_to(*servers: RunningServer, client_address: str = "", **settings: Any) -> Iterator[Gateway]:
    gateway = Gateway(models=NAMES, **settings)
    try:
        gateway.serve(*servers, client_address=client_address)
        if "tls_cert" not in settings:
            wait_until(lambda: is_serving(gateway))
        yield gateway
    finally:
        gateway.stop()


def extract(client: trocar.Client) -> np.ndarray[Any, Any]:
    return client.extract("plain", IMAGES, ["fc"])["fc"]


def stream(client: trocar.Client) -> list[np.ndarray[Any, Any]]:
    with client.extract_stream("plain", iter([IMAGES, IMAGES + 1]), ["fc"]) as results:
        return [result.unwrap()["fc"] for result in results]


def test_calls_with_tensors_need_no_gateway_after_the_first_ones(servers: Pair) -> None:
    with trocar.connect(servers[0].address) as client:
        expected = extract(client), stream(client)
    with gateway_to(*servers) as gateway, trocar.connect(gateway.address, retries=0) as client:
        trainer = client.train("plain", trainable=["fc"])

        def calls() -> float:
            assert np.array_equal(extract(client), expected[0])
            assert all(map(np.array_equal, stream(client), expected[1]))
            return trainer.step(IMAGES, LABELS).loss

        losses = [calls(), calls()]
        gateway.stop()
        assert sorted([*losses, calls()], reverse=True)[0] == losses[0]
        with pytest.raises(ServerUnavailableError):
            client.models()


async def test_an_asyncio_client_needs_no_gateway_either(servers: Pair) -> None:
    with gateway_to(*servers) as gateway:
        async with trocar.aio.connect(gateway.address, retries=0) as client:
            await client.extract("plain", IMAGES, ["fc"])
            expected = await client.extract("plain", IMAGES, ["fc"])
            gateway.stop()
            found = await client.extract("plain", IMAGES, ["fc"])
            batches = [IMAGES, IMAGES]
            async with client.extract_stream("plain", batches, ["fc"]) as results:
                streamed = [result.unwrap()["fc"] async for result in results]
    assert all(np.array_equal(expected["fc"], one) for one in (found["fc"], *streamed))


def test_direct_calls_of_other_threads_keep_their_own_time_after_ctrl_c(
    servers: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the channel of a replica, too, on which such a call may run."""
    retired = []
    monkeypatch.setattr("trocar._sync.connection.retire", lambda *given: retired.append(given))
    with gateway_to(servers[0]) as gateway, trocar.connect(gateway.address, retries=0) as client:
        extract(client)
        client.extract("plain", IMAGES, ["fc"], options=trocar.options(timeout_s=3600.0))
        with monkeypatch.context() as interrupted:
            interrupted.setattr(ReplyAssembler, "feed", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                extract(client)
        extract(client)
    for channel, _ in retired:
        channel.close()
    assert [after_s for _, after_s in retired] == [3600.0] * 2  # the gateway's, and the replica's


@pytest.mark.parametrize("case", ["unreachable", "another server", "refused by the client", "not listed"])
def test_a_client_stays_with_the_gateway(servers: Pair, case: str) -> None:
    addresses = {"unreachable": "127.0.0.1:1", "another server": servers[1].address}
    wanted = case != "refused by the client"
    with (
        gateway_to(
            servers[0], client_address=addresses.get(case, ""), direct=case != "not listed"
        ) as gateway,
        trocar.connect(gateway.address, retries=0, direct=wanted) as client,
    ):
        for _ in range(3):
            extract(client), stream(client)
        gateway.stop()
        with pytest.raises(ServerUnavailableError):
            extract(client)


def test_what_a_draining_replica_refuses_the_gateway_sends_elsewhere(servers: Pair) -> None:
    with gateway_to(*servers) as gateway, trocar.connect(gateway.address, retries=0) as client:
        extract(client), extract(client)
        with trocar.connect(servers[0].address) as operator:
            operator.drain()
            try:
                for _ in range(5):
                    extract(client), stream(client)
            finally:
                operator.drain(undo=True)


def test_calls_go_on_when_a_replica_has_died(servers: Pair) -> None:
    with replica() as dead:
        gateway = Gateway(dead, servers[0], models=NAMES)
        client = trocar.connect(gateway.address, retries=0)
        wait_until(lambda: is_serving(gateway))
        expected, *_ = (extract(client) for _ in range(10))
    try:
        for _ in range(10):
            assert np.array_equal(extract(client), expected)
            assert len(stream(client)) == 2
        gateway.serve(servers[1])  # as after new weights: other replicas alone
        for _ in range(10):
            assert np.array_equal(extract(client), expected)
    finally:
        client.close()
        gateway.stop()


def listed(gateway: Gateway, token: str) -> ListReplicasResponse:
    with raw_channel(gateway.address) as channel:
        stub = ModelServiceStub(channel)
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        return stub.ListReplicas(ListReplicasRequest(model_id="plain"), metadata=metadata, timeout=30)


def test_only_callers_of_the_model_learn_addresses(tmp_path: Path) -> None:
    token = TokenFile(tmp_path).add("ann", {Scope.READ}, expires_at_s=None, now_s=0)[1]
    with replica(data_dir=tmp_path, tokens=True) as server, gateway_to(server) as gateway:
        assert [one.address for one in listed(gateway, str(token)).replicas] == [server.address]
        for wrong in ("", "trocar_" + "A" * 43):
            with pytest.raises(grpc.RpcError) as refused:
                listed(gateway, wrong)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert server.address not in str(refused.value)


@contextmanager
def behind_tls(folder: Path, **settings: Any) -> Iterator[tuple[Gateway, str, Certificate]]:
    """Start gateway and replica with TLS; yield the gateway, its target and the authority."""
    own = authority(folder)
    files = signed(own, folder, "server", "/CN=localhost")
    settings |= {"tls_cert": str(files.certificate), "tls_key": str(files.key)}
    if settings.pop("is_mutual", False):
        settings["tls_client_ca"] = str(own.certificate)
    access = GatewayAccess("127.0.0.1", KEY)
    with (
        replica(gateway=access, data_dir=folder, **settings) as server,
        gateway_to(server, **settings) as gateway,
    ):
        yield gateway, gateway.address.replace("127.0.0.1", "localhost"), own


@pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command to make certificates")
def test_direct_calls_are_encrypted_as_those_to_the_gateway(tmp_path: Path) -> None:
    with behind_tls(tmp_path) as (gateway, target, own):
        tls = trocar.TlsOptions(ca=own.certificate)
        with trocar.connect(target, tls=tls, token="a token") as client:
            expected = extract(client), extract(client)
            gateway.stop()
            assert np.array_equal(extract(client), expected[0])


@pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command to make certificates")
def test_client_certificates_count_behind_the_gateway(tmp_path: Path) -> None:
    TokenFile(tmp_path).add("ann", {Scope.RUN}, expires_at_s=None, now_s=0, for_certificate=True)
    with behind_tls(tmp_path, is_mutual=True) as (gateway, target, own):

        def connect(name: str, **options: Any) -> trocar.Client:
            files = signed(own, tmp_path, name, f"/CN={name}")
            tls = trocar.TlsOptions(own.certificate, files.certificate, files.key)
            return trocar.connect(target, tls=tls, **options)

        with connect("bob") as other, pytest.raises(ScopeMissingError, match="'bob' has none"):
            extract(other)
        with connect("ann") as client, connect("ann", direct=False) as through:
            expected = extract(through), extract(client), extract(client)
            gateway.stop()
            assert np.array_equal(extract(client), expected[0])


@pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command to make certificates")
@pytest.mark.parametrize("key", ["", "another key"])
def test_who_is_no_gateway_cannot_claim_a_certificate(tmp_path: Path, key: str) -> None:
    TokenFile(tmp_path).add("ann", {Scope.READ}, expires_at_s=None, now_s=0, for_certificate=True)
    own = authority(tmp_path)
    files = signed(own, tmp_path, "server", "/CN=localhost")
    settings = {"tls_cert": files.certificate, "tls_key": files.key, "tls_client_ca": own.certificate}
    claim = json.dumps({"x509_common_name": ["ann"]}).encode()
    with replica(gateway=GatewayAccess("127.0.0.1", KEY), data_dir=tmp_path, **settings) as server:

        def ask(key: str) -> Any:
            metadata = (("x-trocar-cluster-key", key), ("x-trocar-caller-peer", "ipv4:1.2.3.4:5"))
            with raw_channel(server.app.rpc.plain_address) as channel:
                stub = ModelServiceStub(channel)
                request = ListReplicasRequest(model_id="plain")
                headers = (*metadata, ("x-trocar-caller-certificate-bin", claim))
                return stub.ListReplicas(request, metadata=headers, timeout=30)

        assert ask(KEY) == ListReplicasResponse()
        with pytest.raises(grpc.RpcError) as refused:
            ask(key)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_token_does_not_leave_this_machine_in_plain_text(servers: Pair) -> None:
    with (
        gateway_to(servers[0], client_address="192.0.2.1:50051") as gateway,
        trocar.connect(gateway.address, token="a token", retries=0, timeout_s=30.0) as client,
    ):
        assert np.array_equal(extract(client), extract(client))
