"""A cluster whose only node with replicas is lost together with Ray Serve's controller."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.killing.simulated_nodes import simulated_nodes
from tests.support.models.tiny_models import Plain
from tests.support.servers.serving import custom
from trocar_server.config import ServerConfig

pytest.importorskip("ray", reason="needs Ray: pip install 'trocar[ray]'")
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

SHAPE = (3, 16, 16)
IMAGES = np.random.default_rng(0).normal(size=(2, *SHAPE)).astype(np.float32)
PATIENCE_S = 300.0


def test_replicas_are_replaced_although_serves_controller_finds_none(tmp_path: Path) -> None:
    """A new controller counts each as a failed start, and by default Serve would give the model up."""
    from trocar_server.cluster import deploying

    place = {"plain": {"min_replicas": 2, "cpus": 0.5}}
    settings: dict[str, Any] = {
        "models": {"plain": custom(Plain, SHAPE)},
        "cluster": {"models": place, "drain_s": 5.0, "hold_s": PATIENCE_S},
    }
    config = ServerConfig(port=0, device="cpu", data_dir=tmp_path / "data", **settings)
    with simulated_nodes(1, cpus=1) as nodes:
        deploying.deploy(config)
        addresses = ",".join(deploying.wait_until_ready(config))
        with trocar.connect(addresses, timeout_s=PATIENCE_S) as client:
            expected = client.extract("plain", IMAGES, ["fc"])["fc"]
            for part in ("node", "Serve's controller"):
                assert nodes.kill(part, random.Random(0))
            nodes.repair()
            assert np.array_equal(client.extract("plain", IMAGES, ["fc"])["fc"], expected)
        deploying.stop()
