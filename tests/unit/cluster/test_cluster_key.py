"""The key of a cluster: made once, complete or absent, for its owner alone."""

import errno
import os
from pathlib import Path

import pytest

from trocar_server.cluster.cluster_key import cluster_key, make_cluster_key
from trocar_server.errors import ServiceError


def test_the_first_key_stays_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    make_cluster_key(tmp_path)
    first = cluster_key(tmp_path)
    make_cluster_key(tmp_path)
    assert cluster_key(tmp_path) == first
    assert len(bytes.fromhex(first)) == 32
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_leaves_no_empty_key_that_would_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(ServiceError):
            make_cluster_key(tmp_path)
    assert list(tmp_path.iterdir()) == []
    make_cluster_key(tmp_path)
    assert cluster_key(tmp_path)


def test_a_key_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "cluster.key").symlink_to(tmp_path / "elsewhere")
    make_cluster_key(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.key"]
