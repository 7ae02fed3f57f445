"""Resources of ranks, and how many of them the nodes hold; without a cluster."""

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'trocar[ray]'")

from trocar_server.cluster.ranks.rank_placement import _fitting, at_address, rank_resources


def test_a_rank_takes_what_a_replica_takes() -> None:
    assert rank_resources(2.0, {"fast_disk": 1.0}) == {"CPU": 2.0, "fast_disk": 1.0}
    assert list(rank_resources(0.0, {})) == ["CPU"]  # a bundle of Ray cannot be empty
    assert rank_resources(0.0, {"fast_disk": 1.0}) == {"fast_disk": 1.0}


@pytest.mark.parametrize(
    ("node", "wanted", "count"),
    [
        ({"CPU": 1.0}, {"CPU": 0.6}, 1),
        ({"CPU": 3.0}, {"CPU": 0.1}, 30),
        ({"CPU": 8.0, "fast_disk": 1.0}, {"CPU": 2.0, "fast_disk": 1.0}, 1),
        ({"CPU": 8.0}, {"CPU": 2.0, "fast_disk": 1.0}, 0),
    ],
)
def test_a_node_holds_as_many_as_its_scarcest_resource(
    node: dict[str, float], wanted: dict[str, float], count: int
) -> None:
    assert _fitting(node, wanted) == count


def test_a_configured_host_stays() -> None:
    assert at_address("10.0.0.5", {"port": 50051})["host"] == "10.0.0.5"
    placed = at_address("10.0.0.5", {"host": "127.0.0.1", "metrics_port": 0})
    assert placed == {"host": "127.0.0.1", "port": 0, "metrics_host": "127.0.0.1", "metrics_port": 0}
