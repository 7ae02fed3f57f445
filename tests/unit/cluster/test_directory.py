"""The directory of a cluster without Ray: whose folders they are, and which replicas it lists."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from trocar_server.storage.folder_lease import lease_holder, new_holder

pytest.importorskip("ray", reason="needs Ray: pip install 'trocar[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

SPEC: dict[str, Any] = {"config": {}, "placements": {"m": {"min_replicas": 1}}}


def directory(data_dir: Path, holder: dict[str, Any]) -> Any:
    from trocar_server.cluster.directory import Directory

    return Directory(str(data_dir), holder)


def holder(number: int) -> dict[str, Any]:
    return asdict(new_holder(f"{number:032}", f"10.0.0.{number}:6379"))


def let_go(one: Any) -> None:
    """End a directory, as its process does."""
    for lease in one._leases.values():
        lease.release()


def test_a_second_cluster_gets_none_of_the_folders(tmp_path: Path) -> None:
    first, second = directory(tmp_path, holder(1)), directory(tmp_path, holder(2))
    shared, own = str(tmp_path / "trainers"), str(tmp_path / "own")
    assert first.claim([str(tmp_path), shared]) == ""
    assert "10.0.0.1:6379" in second.claim([own, shared])
    assert lease_holder(tmp_path / "own") is None
    assert first.claim([str(tmp_path), shared]) == ""  # again, as each application of a file does
    let_go(first)
    assert second.claim([own, shared]) == ""


def test_a_directory_that_ray_starts_again_has_its_folders_again(tmp_path: Path) -> None:
    first = directory(tmp_path, holder(1))
    first.claim([str(tmp_path)])
    first.deploy(SPEC)
    let_go(first)
    again = directory(tmp_path, holder(1))
    assert again.spec()["placements"] == SPEC["placements"]
    assert "10.0.0.1:6379" in directory(tmp_path, holder(2)).claim([str(tmp_path)])


def test_what_another_cluster_deployed_is_no_claim(tmp_path: Path) -> None:
    first = directory(tmp_path, holder(1))
    first.claim([str(tmp_path)])
    first.deploy(SPEC)
    let_go(first)
    directory(tmp_path, holder(2))
    assert lease_holder(tmp_path) is None


def test_what_is_deployed_is_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    one = directory(tmp_path, holder(1))
    one.deploy(SPEC)
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]
    assert (tmp_path / "cluster.json").stat().st_mode & 0o777 == 0o600


def test_a_replica_that_differs_is_listed_as_refused_and_not_as_a_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trocar_server.cluster import members

    monkeypatch.setattr(members, "NEW_FOR_S", 0.0)
    one = directory(tmp_path, holder(1))
    for name, digest in (("a", "one"), ("b", "two")):
        report = {"replica_id": name, "model_id": "m", "node_id": "node"}
        one.join(report, {"parts": {"weights": digest}, "buffers": {}}, "v1")
        one.report_replica(report)
    state = one.state()
    assert [report["replica_id"] for report in state["replicas"]] == ["a"]
    assert list(state["refused"]) == ["m"]
    one.deploy(SPEC)
    assert one.state()["refused"] == {}
