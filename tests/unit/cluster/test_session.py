"""Session with a Ray cluster: which one `auto` may mean."""

import pytest

from trocar_server.cluster.session import open_session
from trocar_server.errors import ServiceError

services = pytest.importorskip("ray._private.services", reason="needs Ray: pip install 'trocar[ray]'")


def test_auto_is_refused_where_any_of_several_clusters_could_be_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = frozenset({"10.0.0.1:2", "10.0.0.1:1"})
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: found)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda _: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    named = pytest.raises(ServiceError, match=r"--ray 10\.0\.0\.1:1 or --ray 10\.0\.0\.1:2")
    with named, open_session("auto"):
        pytest.fail("connected")
