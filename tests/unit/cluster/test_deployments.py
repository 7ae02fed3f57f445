"""What the supervisors of a cluster decide without Ray."""

import time

import pytest

from trocar_server.cluster.replica_server import own_config
from trocar_server.config import ClusterConfig, ModelConfig, PlacementConfig, ServerConfig

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


def test_a_replica_takes_no_port_from_the_environment_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several replicas run on a node, and the image of the server sets ports and a page for one."""
    from trocar_server.cluster.deployments import child_config
    from trocar_server.cluster.rank_placement import at_address

    given = ServerConfig(models={"a": ModelConfig(architecture="resnet18")})
    monkeypatch.setenv("TROCAR_HOST", "0.0.0.0")
    monkeypatch.setenv("TROCAR_PORT", "50051")
    monkeypatch.setenv("TROCAR_HEALTH_PORT", "50052")
    monkeypatch.setenv("TROCAR_METRICS_PORT", "9464")
    monkeypatch.setenv("TROCAR_PAGE__ENABLED", "true")
    monkeypatch.setenv("TROCAR_MODELS__b__ARCHITECTURE", "vgg11")
    for config in (given, ServerConfig(models=given.models, health_port=1, metrics_port=2)):
        settings = at_address("10.0.0.1", child_config(config, "a", PlacementConfig()))
        found = own_config({"config": settings, "model_id": "a"})
        assert (found.host, found.port, found.health_port) == ("10.0.0.1", 0, None)
        assert not found.page.enabled
        assert found.metrics_port == (None if config is given else 0)
        assert list(found.models) == ["a"]


def test_a_gateway_learns_how_long_it_may_wait_for_calls() -> None:
    from trocar_server.cluster.deployments import gateway_config

    settings = gateway_config(ServerConfig(grace_s=40.0, cluster=ClusterConfig(drain_s=7.0)))
    found = ServerConfig(**settings)
    assert (found.cluster.drain_s, found.grace_s) == (7.0, 40.0)
