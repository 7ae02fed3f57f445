"""A configuration file of Ray Serve, as in KubeRay's RayService, deploys what `trocar serve --ray` does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import trocar
from tests.support.files.deployment import DEPLOY, documents
from tests.support.servers.ray_cluster import ray_nodes, write_config
from tests.support.servers.waiting import wait_until
from trocar_server.auth import Scope, TokenFile
from trocar_server.config import read_config

pytest.importorskip("ray", reason="needs Ray: pip install 'trocar[ray]'")
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

MODELS = {"resnet50": {"architecture": "squeezenet1_1", "weights": "random:0"}}


def is_known() -> bool:
    """Whether an application has made the directory, by which a deployment is seen."""
    from trocar_server.cluster.directory import open_directory

    try:
        open_directory()
    except ValueError:
        return False
    return True


def test_the_applications_of_the_manifest_serve(tmp_path: Path) -> None:
    path = write_config(tmp_path / "cluster.toml", MODELS, {"resnet50": "cpus = 0.5"}, drain_s=5)
    token = TokenFile(tmp_path / "data").add("ann", {Scope.RUN}, expires_at_s=None, now_s=0)[1]
    (manifest,) = documents(DEPLOY / "kubernetes" / "ray" / "rayservice.yaml")
    described: dict[str, Any] = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    for app in described["applications"]:
        app["args"]["config"] = str(path)
    with ray_nodes(1):
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        from trocar_server.cluster import deploying

        serve.start(proxy_location="Disabled")
        client: Any = _get_global_client()
        client.deploy_apps(ServeDeploySchema.model_validate(described))  # what the REST API of Ray calls
        wait_until(is_known)
        (address,) = deploying.wait_until_ready(read_config(path))
        with trocar.connect(address, token=str(token)) as connected:
            images = np.zeros((1, 3, 64, 64), np.float32)
            assert connected.extract("resnet50", images, ["classifier"])["classifier"].shape[:2] == (1, 1000)
        deploying.stop()
