"""The manifests of a Ray cluster: Kubernetes' schemas, Ray Serve's own, and the configuration."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.files.deployment import DEPLOY, documents
from trocar_server.config import ServerConfig, read_config

pytest.importorskip("ray", reason="needs Ray: pip install 'trocar[ray]'")

RAY = DEPLOY / "kubernetes" / "ray"
(SERVICE,) = documents(RAY / "rayservice.yaml")
SPEC = SERVICE["spec"]
CLUSTER = SPEC["rayClusterConfig"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    text = next(entry for entry in documents(RAY / "cluster.yaml") if entry["kind"] == "ConfigMap")
    path = tmp_path / "cluster.toml"
    path.write_text(text["data"]["cluster.toml"])
    return read_config(path)


@pytest.mark.parametrize("manifest", documents(RAY / "cluster.yaml"), ids=lambda entry: entry["kind"])
def test_the_manifest_is_of_kubernetes_schema(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("group", GROUPS, ids=["head", "workers"])
def test_the_pods_are_of_kubernetes_schema(group: dict[str, Any]) -> None:
    template = group["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    assert all(isinstance(value, str) for value in group["rayStartParams"].values())


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_the_applications_are_of_ray_serves_schema_and_of_the_configuration(config: ServerConfig) -> None:
    from ray.serve.schema import ServeDeploySchema

    from trocar_server.cluster import application
    from trocar_server.cluster.deployments import APP_PREFIX, GATEWAY_APP

    schema = ServeDeploySchema.model_validate(yaml.safe_load(SPEC["serveConfigV2"]))
    assert schema.proxy_location == "Disabled"
    assert {app.name for app in schema.applications} == {
        GATEWAY_APP,
        *(APP_PREFIX + m for m in config.models),
    }
    for app in schema.applications:
        module, _, name = app.import_path.partition(":")
        assert module == application.__name__
        assert callable(getattr(application, name))
        assert app.args.get("model_id", "") == (
            "" if app.name == GATEWAY_APP else app.name[len(APP_PREFIX) :]
        )


def test_ray_is_never_without_its_token() -> None:
    for group in GROUPS:
        (container,) = group["template"]["spec"]["containers"]
        variables = {entry["name"]: entry for entry in container["env"]}
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {
            "name": "trocar-ray",
            "key": "token",
        }


@pytest.mark.parametrize("group", GROUPS, ids=["head", "workers"])
def test_a_start_does_not_open_the_tokens_to_the_group(group: dict[str, Any]) -> None:
    """By default the kubelet makes all files group-readable, and the server refuses such tokens."""
    security = group["template"]["spec"]["securityContext"]
    assert security["fsGroup"] == security["runAsGroup"]
    assert security["fsGroupChangePolicy"] == "OnRootMismatch"


@pytest.mark.parametrize("group", GROUPS, ids=["head", "workers"])
def test_prometheus_reaches_the_metrics_of_every_gateway(config: ServerConfig, group: dict[str, Any]) -> None:
    (container,) = group["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["trocar-metrics"] == config.metrics_port
    assert "metrics" not in ports  # KubeRay takes a port of that name for Ray's own metrics
    policy = next(entry for entry in documents(RAY / "cluster.yaml") if entry["kind"] == "NetworkPolicy")
    (scrape,) = (
        rule
        for rule in policy["spec"]["ingress"]
        if config.metrics_port in {port["port"] for port in rule.get("ports", ())}
    )
    assert scrape["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]
