"""Who shares the server's time as one."""

import pytest

from trocar_server.models import ANONYMOUS
from trocar_server.rpc.call.principal import flow_of


def test_a_principal_is_one_however_many_connections_it_has() -> None:
    peers = ("ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2", "ipv6:%5B2001:db8::1%5D:3", "unix:")
    assert {flow_of("alice", peer) for peer in peers} == {"alice"}


@pytest.mark.parametrize(
    ("one", "other"),
    [("ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2"), ("ipv6:%5B::1%5D:1", "ipv6:%5B::1%5D:2")],
)
def test_nameless_callers_of_this_machine_are_told_apart_by_connection(one: str, other: str) -> None:
    assert flow_of(ANONYMOUS, one) != flow_of(ANONYMOUS, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("ipv4:10.0.0.1:1", "ipv4:10.0.0.1:2"), ("ipv6:%5B2001:db8::1%5D:1", "ipv6:%5B2001:db8::1%5D:2")],
)
def test_nameless_callers_of_other_machines_are_told_apart_by_address(one: str, other: str) -> None:
    assert flow_of(ANONYMOUS, one) == flow_of(ANONYMOUS, other)
    assert flow_of(ANONYMOUS, one) != flow_of(ANONYMOUS, "ipv4:10.0.0.2:1")


def test_a_nameless_caller_is_nobody_who_has_a_name() -> None:
    assert flow_of(ANONYMOUS, "unix:") not in (ANONYMOUS, flow_of("alice", "unix:"))
