"""Bulk extraction with Ray, without a cluster: what ends a run is an error of ours."""

import socket
from pathlib import Path
from typing import Any

import pytest

from trocar._export.options import Options
from trocar._export.ray_pool import Reader, Work
from trocar._transport.channel import ConnectOptions
from trocar.errors import PermissionDeniedError, SourceError

ray: Any = pytest.importorskip("ray", reason="needs Ray: pip install 'trocar[ray]'")


def test_a_cluster_that_wants_its_token_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import AuthenticationError

    import trocar.ray

    def refuse(**_: object) -> None:
        raise AuthenticationError("the token is missing")

    monkeypatch.setattr(ray, "init", refuse)
    refused = pytest.raises(
        PermissionDeniedError, match=r"'auto' wants its own token: .* RAY_AUTH_TOKEN_PATH"
    )
    with refused, trocar.ray.session("auto"):
        pytest.fail("connected")


def test_a_node_that_cannot_read_the_source_names_itself(tmp_path: Path) -> None:
    connection = ConnectOptions("127.0.0.1:1", timeout_s=1.0, token=None, tls=None, retries=0)
    missing = str(tmp_path / "none.npy")
    work = Work(connection, "plain", ["fc"], Options(), missing, str(Path.cwd()), 4, 1 << 20)
    chunk = Reader(work, {}).chunk(0, 16)
    assert chunk.outcomes == []
    assert isinstance(chunk.error, SourceError)
    assert socket.gethostname() in str(chunk.error)
    assert "none.npy" in str(chunk.error)
