"""Forwarded calls: peer and certificate of the gateway's caller, from a gateway with the key alone."""

from typing import Any

import pytest

from trocar_server.rpc.call.authorization import certificate_name
from trocar_server.rpc.call.forwarded import caller_metadata, original, without_claims
from trocar_server.rpc.call.principal import flow_of

NAMES = [b"\xc3\xa9"]
CERTIFICATE = {"x509_subject_alternative_name": NAMES, "peer_dns": NAMES}


class Context:
    def __init__(self, peer: str, metadata: Any = (), certificate: Any = None) -> None:
        self.peer = lambda: peer
        self.invocation_metadata = lambda: metadata
        self.auth_context = lambda: certificate or {}


def forwarded(key: str) -> Any:
    caller: Any = Context("ipv4:10.0.0.7:5", certificate=CERTIFICATE)
    return Context("ipv4:10.0.0.1:9", caller_metadata(key, caller))


def test_a_replica_sees_the_caller_of_the_gateway() -> None:
    found = original(forwarded("key"), "key")
    assert flow_of("anonymous", found.peer()) == "anonymous ipv4:10.0.0.7"
    assert certificate_name(found.auth_context()) == "DNS:\u00e9"


@pytest.mark.parametrize(("sent", "own"), [("another", "key"), ("", "key"), ("", ""), ("key", "")])
def test_without_the_key_nothing_is_believed(sent: str, own: str) -> None:
    context = forwarded(sent)
    assert original(context, own) is context


def test_a_gateway_passes_no_claims_of_its_callers_on() -> None:
    claims = forwarded("guess").invocation_metadata()
    assert without_claims([*claims, ("authorization", "Bearer t")]) == [("authorization", "Bearer t")]
