"""The Compose files: their schema, what they refer to, and what hardening promises."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
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
from trocar_server.app.access import check_address
from trocar_server.config import read_config

FILES = sorted(DEPLOY.glob("compose*.yaml"))
(COMPOSE,) = documents(DEPLOY / "compose.yaml")
SERVICES: dict[str, Any] = COMPOSE["services"]
SERVER = SERVICES["trocar"]
CONFIG = DEPLOY / "compose" / "trocar.toml"
MADE_BY_HAND = {DEPLOY / "compose" / "grafana-password"}

services = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_file_is_of_the_compose_specification(path: Path) -> None:
    schema = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    (content,) = documents(path)
    jsonschema.validate(content, json.loads(schema.read_text()))


@services
def test_a_service_has_no_more_rights_than_it_needs(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["user"].split(":")[0]) > 0
    assert not {"privileged", "cap_add", "network_mode", "pid", "devices"} & set(service)


@services
def test_a_service_is_reached_from_this_machine_only(service: dict[str, Any]) -> None:
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


@services
def test_a_service_is_watched_and_bounded(service: dict[str, Any]) -> None:
    assert service["healthcheck"]["test"][0] == "CMD"
    limits = service["deploy"]["resources"]["limits"]
    assert memory(limits["memory"]) > 0
    assert float(limits["cpus"]) > 0
    assert limits["pids"] > 0
    assert service["logging"]["options"]["max-size"]


@services
def test_everything_that_is_mounted_exists(service: dict[str, Any]) -> None:
    for volume in service["volumes"]:
        source = volume["source"] if isinstance(volume, dict) else volume.split(":")[0]
        if source.startswith("."):
            assert (DEPLOY / source).exists(), source
            assert volume["read_only"] if isinstance(volume, dict) else volume.endswith(":ro")
        else:
            assert source in COMPOSE["volumes"]


def test_the_services_refer_to_what_there_is() -> None:
    for service in SERVICES.values():
        assert set(service["networks"]) <= set(COMPOSE["networks"])
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"])
        assert set(service.get("depends_on", ())) <= set(SERVICES)
    secrets = {DEPLOY / secret["file"] for secret in COMPOSE["secrets"].values()}
    assert secrets == MADE_BY_HAND  # which git ignores
    ignored = (DEPLOY.parent / ".gitignore").read_text()
    assert all(f"/{path.relative_to(DEPLOY.parent)}" in ignored for path in MADE_BY_HAND)


def test_only_the_server_and_what_watches_it_share_a_network() -> None:
    assert COMPOSE["networks"]["watch"] == {"internal": True}
    assert set(SERVER["networks"]) & set(SERVICES["grafana"]["networks"]) == {"watch"}


def test_the_command_exists_and_the_health_check_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parse(["serve", *SERVER["command"]])
    program, *words = SERVER["healthcheck"]["test"][1:]
    assert program == "trocar"
    parse(words)
    assert f"localhost:{image_environment()['TROCAR_HEALTH_PORT']}" in words


def test_the_configuration_is_one_that_the_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in image_environment().items():
        if name.startswith("TROCAR_"):
            monkeypatch.setenv(name, value)
    config = read_config(CONFIG, insecure="--insecure" in SERVER["command"])
    check_address(config)
    assert config.tokens
    assert [str(config.port) == port.split(":")[-1] for port in SERVER["ports"]] == [True]
    assert unknown_settings(SERVER["environment"]) == set()


def test_limits_of_the_server_fit_those_of_its_container() -> None:
    config = read_config(CONFIG)
    limits = SERVER["deploy"]["resources"]["limits"]
    in_memory = sum(memory(entry.split("size=")[1].split(",")[0]) for entry in SERVER["tmpfs"])
    assert any(entry.startswith("/data/scratch:") for entry in SERVER["tmpfs"])
    assert config.threads == float(limits["cpus"])
    assert config.limits.max_pass_bytes + config.limits.max_pending_bytes + in_memory < memory(
        limits["memory"]
    )
    assert int(SERVER["stop_grace_period"].removesuffix("s")) >= config.grace_s + CHECKPOINTS_S


def test_prometheus_asks_where_the_server_shows_its_metrics() -> None:
    (prometheus,) = documents(DEPLOY / "compose" / "prometheus.yaml")
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"trocar:{SERVER['environment']['TROCAR_METRICS_PORT']}"]}]
    rules = DEPLOY / "prometheus"
    mounted = f"./prometheus:{Path(prometheus['rule_files'][0]).parent}:ro"
    assert mounted in SERVICES["prometheus"]["volumes"]
    assert list(rules.glob(Path(prometheus["rule_files"][0]).name))


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    (source,) = documents(DEPLOY / "compose" / "grafana-datasource.yaml")
    (provider,) = documents(DEPLOY / "compose" / "grafana-dashboards.yaml")
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    folder = provider["providers"][0]["options"]["path"]
    assert f"./grafana:{folder}:ro" in SERVICES["grafana"]["volumes"]
    assert list((DEPLOY / "grafana").glob("*.json"))


def test_the_gpu_file_changes_the_server_alone() -> None:
    (gpu,) = documents(DEPLOY / "compose.gpu.yaml")
    assert set(gpu) == {"services"}
    assert set(gpu["services"]) == {"trocar"}
    assert unknown_settings(gpu["services"]["trocar"]["environment"]) == set()
