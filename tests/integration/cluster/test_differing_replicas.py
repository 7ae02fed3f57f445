"""A cluster whose model is a factory without fixed weights: one replica serves, and others are refused."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.servers.ray_cluster import command, ray_nodes
from tests.support.servers.serving import custom
from trocar_server.config import ServerConfig
from trocar_server.errors import ServiceError

pytest.importorskip("ray", reason="needs Ray: pip install 'trocar[ray]'")
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

SHAPE = (3, 16, 16)
IMAGES = np.random.default_rng(0).normal(size=(2, *SHAPE)).astype(np.float32)
PATIENCE_S = 300.0
ADVICE = "[models.plain] weights"


def test_equal_calls_have_equal_answers_though_every_replica_draws_its_weights(tmp_path: Path) -> None:
    import ray

    from trocar_server.cluster import deploying
    from trocar_server.cluster.directory import open_directory

    drawn = custom(Plain, SHAPE, weights="DEFAULT")
    config = ServerConfig(
        port=0,
        device="cpu",
        data_dir=tmp_path / "data",
        models={"plain": drawn},  # type: ignore[dict-item]
        cluster={"models": {"plain": {"min_replicas": 2, "cpus": 0.5}}, "hold_s": PATIENCE_S},  # type: ignore[arg-type]
    )
    with ray_nodes(2) as ray_address:
        deploying.deploy(config)
        refused: list[str] = []
        address = deploying.wait_until_ready(config, on_refused=refused.append)[0]
        assert len(refused) == 1
        assert ADVICE in refused[0]
        with pytest.raises(ServiceError, match="a replica was refused"):
            deploying.wait_until_ready(config)
        assert ADVICE in command("cluster", "status", "--ray", ray_address).stdout
        assert ADVICE in command("doctor", "--address", address).stdout
        with trocar.connect(address, timeout_s=PATIENCE_S) as client:
            first = answers(client)
            assert len(first) == 1
            (feature,) = (one for one in client.server_info().features if one.name == "replicas")
            assert (feature.is_on, ADVICE in feature.reason) == (False, True)
            state: Any = ray.get(open_directory().state.remote())
            (replica,) = state["replicas"]
            os.kill(replica["process_id"], signal.SIGKILL)
            again = answers(client)  # waits until another one is the first of new ones
            assert len(again) == 1
            assert again != first
        deploying.stop()


def answers(client: trocar.Client) -> set[bytes]:
    """Return the different answers to 40 equal calls."""
    return {client.extract("plain", IMAGES, ["fc"])["fc"].tobytes() for _ in range(40)}
