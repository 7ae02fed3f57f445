"""What the supervisors of a cluster decide without Ray."""

import time

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'trocar[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


def report(node_id: str, bound: str, node_address: str = "10.0.0.1") -> dict[str, str]:
    return {"node_id": node_id, "node_address": node_address, "bound": bound}


def test_a_gateway_gets_the_port_of_the_dead_one_on_its_node() -> None:
    """Clients know the port; the report of a gateway that was killed stays for some seconds."""
    from trocar_server.cluster.deployments import taken_addresses

    assert taken_addresses([report("a", "0.0.0.0:50051")], "10.0.0.1", "a") == []


def test_simulated_nodes_of_one_machine_do_not_share_a_port() -> None:
    from trocar_server.cluster.deployments import taken_addresses

    reports = [report("b", "127.0.0.1:50051"), report("c", "127.0.0.1:50051", "10.0.0.2")]
    assert taken_addresses(reports, "10.0.0.1", "a") == ["127.0.0.1:50051"]


def test_a_directory_that_was_just_started_says_so(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways would take replicas that have not reported yet for lost, and close their connections."""
    from trocar_server.cluster import directory

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    known = directory.Directory(str(tmp_path_factory.mktemp("data")))
    assert known.state()["is_new"]
    now[0] += 2.0
    assert not known.state()["is_new"]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "Traceback ...\ntrocar_server.cluster.child_process.ChildFailedError: no such file 'x'\n",
            "no such file 'x'",
        ),
        (
            "Traceback ...\ntrocar_server.errors.ServiceError: the key of the cluster cannot be read\nmore",
            "the key of the cluster cannot be read",
        ),
        ("something\nelse", "else"),
        ("", "see the logs of Ray"),
    ],
)
def test_our_own_words_are_found_in_a_traceback(message: str, expected: str) -> None:
    from trocar_server.cluster.deploying import cause_of

    assert cause_of(message) == expected
