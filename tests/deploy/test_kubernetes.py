"""The manifests: their schema, what they refer to, and that they agree with the server."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.support.files.command_lines import parse
from tests.support.files.deployment import (
    CHECKPOINTS_S,
    DEPLOY,
    documents,
    image_environment,
    memory,
    unknown_settings,
)
from tests.support.files.json_patch import patched
from trocar_server.app.access import check_address
from trocar_server.auth import Scope, TokenFile
from trocar_server.auth.grants import decode
from trocar_server.config import ServerConfig, read_config
from trocar_server.errors import ServiceError
from trocar_server.rpc.descriptors import service_names
from trocar_server.rpc.listen.health_port import LIVE

KUBERNETES = DEPLOY / "kubernetes"
BASE = KUBERNETES / "base"
VERSIONS = ("1.30", kubernetes_validate.latest_version())
APART = {"secrets.example.yaml", "servicemonitor.yaml", "kustomization.yaml"}
"""What `kubectl apply --kustomize` leaves out."""


def found(path: Path, kind: str) -> dict[str, Any]:
    return next(entry for entry in documents(path) if entry["kind"] == kind)


KUSTOMIZATION = found(BASE / "kustomization.yaml", "Kustomization")
STATEFUL_SET = found(BASE / "statefulset.yaml", "StatefulSet")
POD = STATEFUL_SET["spec"]["template"]
SPEC = POD["spec"]
(SERVER,) = SPEC["containers"]
CONFIG_MAP = found(BASE / "configmap.yaml", "ConfigMap")
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerConfig:
    """Read the configuration as a pod does, with the variables of the image and of the manifest."""
    (tmp_path / "trocar.toml").write_text(CONFIG_MAP["data"]["trocar.toml"])
    variables = image_environment() | {entry["name"]: entry["value"] for entry in SERVER["env"]}
    for name, value in variables.items():
        if name.startswith("TROCAR_"):
            monkeypatch.setenv(name, value)
    return read_config(tmp_path / "trocar.toml")


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(BASE.glob("*.yaml")):
        if path.name not in ("kustomization.yaml", "servicemonitor.yaml"):
            for index, entry in enumerate(documents(path)):
                yield f"{path.stem}-{index}", entry


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", [m for _, m in manifests()], ids=[name for name, _ in manifests()])
def test_the_manifest_is_of_kubernetes_schema(manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)
    assert manifest["kind"] == "Namespace" or manifest["metadata"]["namespace"] == KUSTOMIZATION["namespace"]


def test_all_manifests_are_applied() -> None:
    assert set(KUSTOMIZATION["resources"]) == {path.name for path in BASE.glob("*.yaml")} - APART


@pytest.mark.parametrize("version", VERSIONS)
def test_with_a_gpu_the_manifest_is_valid_too(version: str) -> None:
    overlay = found(KUBERNETES / "gpu" / "kustomization.yaml", "Kustomization")
    assert (KUBERNETES / "gpu" / overlay["resources"][0]).resolve() == BASE
    (patch,) = overlay["patches"]
    changed = patched(STATEFUL_SET, patch["patch"])
    kubernetes_validate.validate(changed, version, strict=True)
    (server,) = changed["spec"]["template"]["spec"]["containers"]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert unknown_settings({entry["name"]: entry["value"] for entry in server["env"]}) == set()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_kubectl_puts_the_manifests_together(folder: str, tmp_path: Path) -> None:
    command = ["kubectl", "kustomize", str(KUBERNETES / folder)]
    built = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (tmp_path / "all.yaml").write_text(built)
    kinds = [entry["kind"] for entry in documents(tmp_path / "all.yaml")]
    assert len(kinds) == len(KUSTOMIZATION["resources"])
    assert "registry.example.org/trocar:0.1.0" in built


def test_the_pod_is_restricted() -> None:
    pod = SPEC["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["runAsUser"] == pod["runAsGroup"] == pod["fsGroup"] == 10001
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert SPEC["automountServiceAccountToken"] is False
    for container in (*SPEC["initContainers"], *SPEC["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])


def test_a_service_of_that_name_would_change_the_servers_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROCAR_PORT", "tcp://10.96.0.1:50051")  # what Kubernetes sets for a Service `trocar`
    with pytest.raises(ServiceError, match="port"):
        read_config()
    assert SPEC["enableServiceLinks"] is False


def test_the_configuration_needs_no_insecure(config: ServerConfig) -> None:
    assert not config.insecure
    assert config.host == "0.0.0.0"
    check_address(config)
    mounts = {mount["mountPath"]: mount["name"] for mount in SERVER["volumeMounts"]}
    for file in (config.tls_cert, config.tls_key):
        assert file
        assert mounts[str(file.parent)] == "tls"


def test_the_variables_are_settings() -> None:
    assert unknown_settings({entry["name"]: entry["value"] for entry in SERVER["env"]}) == set()


def test_the_arguments_exist(tmp_path: Path) -> None:
    parse(["serve", *SERVER["args"]])
    folder, name = SERVER["args"][1].rsplit("/", 1)
    assert folder in {mount["mountPath"] for mount in SERVER["volumeMounts"]}
    assert name in CONFIG_MAP["data"]
    assert not any("subPath" in mount for mount in SERVER["volumeMounts"])  # which would not follow changes


def test_ports_are_those_of_the_server(config: ServerConfig) -> None:
    ports = {port["name"]: port["containerPort"] for port in SERVER["ports"]}
    assert ports["grpc"] == config.port
    assert ports["health"] == config.health_port
    assert str(ports["metrics"]) == next(
        e["value"] for e in SERVER["env"] if e["name"] == "TROCAR_METRICS_PORT"
    )
    service = found(BASE / "service.yaml", "Service")["spec"]
    assert {port["targetPort"]: port["port"] for port in service["ports"]}.items() <= ports.items()
    policy = found(BASE / "networkpolicy.yaml", "NetworkPolicy")["spec"]
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} <= set(ports)


def test_probes_ask_for_names_that_the_health_service_knows(config: ServerConfig) -> None:
    assert {SERVER[probe]["grpc"]["port"] for probe in PROBES} == {config.health_port}
    names = {probe: SERVER[probe]["grpc"].get("service", "") for probe in PROBES}
    assert names["startupProbe"] == ""
    assert names["readinessProbe"] in service_names()
    assert names["livenessProbe"] == LIVE  # which a draining server still says


def test_the_pod_has_time_to_stop(config: ServerConfig) -> None:
    assert SPEC["terminationGracePeriodSeconds"] >= config.grace_s + CHECKPOINTS_S


def test_limits_of_the_server_fit_those_of_its_container(config: ServerConfig) -> None:
    limits = SERVER["resources"]["limits"]
    (scratch,) = [volume["emptyDir"] for volume in SPEC["volumes"] if volume["name"] == "scratch"]
    assert scratch["medium"] == "Memory"
    assert config.limits.max_pass_bytes + config.limits.max_pending_bytes + memory(
        scratch["sizeLimit"]
    ) < memory(limits["memory"])
    assert config.threads == int(limits["cpu"])


def test_everything_that_is_mounted_is_there() -> None:
    volumes = {volume["name"] for volume in SPEC["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in STATEFUL_SET["spec"]["volumeClaimTemplates"]}
    mounted = {m["name"] for c in (*SPEC["initContainers"], SERVER) for m in c["volumeMounts"]}
    assert mounted == volumes
    secrets = {entry["metadata"]["name"] for entry in documents(BASE / "secrets.example.yaml")}
    assert {v["secret"]["secretName"] for v in SPEC["volumes"] if "secret" in v} == secrets
    assert [v["configMap"]["name"] for v in SPEC["volumes"] if "configMap" in v] == [
        CONFIG_MAP["metadata"]["name"]
    ]


def test_selectors_find_the_pods() -> None:
    labels = POD["metadata"]["labels"]
    selectors = [
        STATEFUL_SET["spec"]["selector"]["matchLabels"],
        found(BASE / "service.yaml", "Service")["spec"]["selector"],
        found(BASE / "poddisruptionbudget.yaml", "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        found(BASE / "networkpolicy.yaml", "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        found(BASE / "servicemonitor.yaml", "ServiceMonitor")["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    service = found(BASE / "service.yaml", "Service")
    assert service["spec"]["clusterIP"] == "None"
    assert STATEFUL_SET["spec"]["serviceName"] == service["metadata"]["name"]


def test_the_token_file_that_the_first_container_makes_is_one_that_the_server_trusts(tmp_path: Path) -> None:
    made, mounted, data = (tmp_path / name for name in ("made", "secret", "data"))
    TokenFile(made).add("alice", [Scope.RUN], expires_at_s=None, now_s=0.0)
    mounted.mkdir()
    data.mkdir()
    (mounted / "..data.json").write_bytes((made / "tokens.json").read_bytes())
    (mounted / "..data.json").chmod(0o440)
    (mounted / "tokens.json").symlink_to("..data.json")  # as a Secret is mounted
    with pytest.raises(ServiceError):
        TokenFile(mounted).read()
    command = SPEC["initContainers"][0]["command"]
    places = {
        "/etc/trocar/tokens/tokens.json": mounted / "tokens.json",
        "/data/tokens.json": data / "tokens.json",
    }
    subprocess.run([str(places.get(word, word)) for word in command], check=True)
    assert [grant.name for grant in TokenFile(data).read()] == ["alice"]


def test_the_example_of_tokens_is_one() -> None:
    (tokens,) = [e for e in documents(BASE / "secrets.example.yaml") if e["type"] == "Opaque"]
    assert decode(tokens["stringData"]["tokens.json"].encode()) == ()
    assert json.loads(tokens["stringData"]["tokens.json"])["grants"] == []
