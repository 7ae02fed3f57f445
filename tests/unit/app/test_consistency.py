"""Mistakes of a configuration whose settings are each valid: refused before anything listens."""

import socket
from typing import Any

import pytest

from tests.support.models.tiny_models import Plain
from tests.support.servers.serving import custom
from trocar_api.reasons import ErrorReason
from trocar_server.app import app
from trocar_server.app.consistency import check_consistency
from trocar_server.app.specs import model_spec
from trocar_server.config import ModelConfig, ServerConfig
from trocar_server.doctor.configuration_checks import check_settings
from trocar_server.errors import ServiceError
from trocar_server.models import Catalogue
from trocar_server.models.building import build
from trocar_server.rpc.listen.binding import why_not_bound


def configured(**settings: Any) -> ServerConfig:
    return ServerConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"metrics_port": 50051}, "port and metrics_port are both 50051"),
        ({"port": 9000, "health_port": 9000}, "port and health_port are both 9000"),
        ({"host": "localhost", "metrics_port": 50051}, "port and metrics_port are both 50051"),
        ({"host": "0.0.0.0", "metrics_port": 50051}, "port and metrics_port are both 50051"),
        (
            {"health_port": 8080, "page": {"enabled": True}},
            "health_port and page.port are both 8080",
        ),
        (
            {"host": "unix:/tmp/a.sock", "health_port": 7000, "metrics_port": 7000},
            "health_port and metrics_port are both 7000",
        ),
        (
            {"models": {"resnet18": {}}, "cluster": {"models": {"resnt18": {}}}},
            "[cluster.models.resnt18] places a model that is not configured; nearest: resnet18",
        ),
        ({"cluster": {"models": {"zebra": {}}}}, "add [models.zebra], or remove the placement"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], problem: str) -> None:
    config = configured(**settings)
    with pytest.raises(ServiceError) as caught:
        check_consistency(config)
    assert problem in caught.value.message
    assert [finding.text for finding in check_settings(config)] == [caught.value.message]


@pytest.mark.parametrize(
    "settings",
    [
        {"metrics_port": 9464},
        {"port": 0, "metrics_port": 0, "health_port": 0},
        {"host": "192.0.2.1", "metrics_port": 50051},
        {"host": "unix:/tmp/a.sock", "metrics_port": 50051},
        {"metrics_port": 8080},
        {"models": {"resnet18": {}}, "cluster": {"models": {"resnet18": {}}}},
    ],
)
def test_settings_that_agree_are_accepted(settings: dict[str, Any]) -> None:
    check_consistency(configured(**settings))
    assert list(check_settings(configured(**settings))) == []


async def test_a_server_does_not_start_with_two_listeners_on_one_port() -> None:
    with pytest.raises(ServiceError, match="are both 50051"):
        await app.start(configured(metrics_port=50051, device="cpu"))


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (
            {"factory": "mod:build", "architecture": "resnet18"},
            "factory and architecture are given; give one of source, factory and architecture",
        ),
        ({"source": "timm:x", "factory": "a:b"}, "source and factory are given"),
        ({"factory": "mod.build"}, "factory 'mod.build' is not module:callable, for example mod:build"),
        ({"factory": "build"}, "factory 'build' is not module:callable"),
        ({"source": "keras:resnet"}, "'keras:resnet' is not a source; write timm:NAME"),
        ({"architecture": "timm:vit"}, "architecture 'timm:vit' is a source; write source = \"...\""),
        ({"architecture": "mod:build"}, "is a factory"),
        ({"dtype": "fp16", "architecture": "resnt18"}, "no architecture 'resnt18'; nearest: resnet18"),
    ],
)
def test_the_origin_of_a_model_is_checked(model: dict[str, Any], problem: str) -> None:
    with pytest.raises(ServiceError) as caught:
        Catalogue().add(model_spec("mine", ModelConfig(**model)))
    assert problem in caught.value.message


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        ("no_such_module:build", "no module 'no_such_module' can be imported; install it, or add its folder"),
        ("tests.no_such_module:build", "no module 'tests.no_such_module' can be imported"),
        ("tests.support.models.tiny_models:Plin", "has no 'Plin'; nearest: Plain"),
    ],
)
def test_a_factory_that_is_not_there_is_named(factory: str, problem: str, tmp_path: Any) -> None:
    spec = model_spec("mine", ModelConfig(factory=factory, weights="random:0"))
    with pytest.raises(ServiceError) as caught:
        build(spec, tmp_path)
    assert caught.value.reason is ErrorReason.MODEL_INVALID
    assert problem in caught.value.message


@pytest.mark.parametrize(("names", "is_refused"), [(("a", "b"), True), (tuple("abcde"), False), ((), False)])
async def test_class_names_are_as_many_as_outputs(names: tuple[str, ...], is_refused: bool) -> None:
    models = {
        "mine": ModelConfig(**custom(Plain, (3, 8, 8), categories=names)),
        "other": ModelConfig(**OTHER),
    }
    running = await app.start(ServerConfig(port=0, device="cpu", models=models))
    try:
        entry = running.engine.catalogue.get("mine")
        assert (entry.hosted is None) == is_refused
        expected = "model 'mine': categories has 2 names, and the model 5 outputs" if is_refused else ""
        assert entry.error_message.startswith(expected)
        assert bool(entry.error_message) == is_refused
    finally:
        await running.stop()


OTHER = custom(Plain, (3, 8, 8))


async def test_wrong_class_names_of_the_only_model_end_the_start() -> None:
    models = {"mine": ModelConfig(**custom(Plain, (3, 8, 8), categories=("a", "b")))}
    with pytest.raises(ServiceError, match="categories has 2 names"):
        await app.start(ServerConfig(port=0, device="cpu", models=models))


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("no-such-host.invalid", "no host is called 'no-such-host.invalid'"),
        ("192.0.2.1", "it is not an address of this machine"),
    ],
)
async def test_a_host_that_cannot_be_listened_on_is_told(host: str, problem: str) -> None:
    with pytest.raises(ServiceError) as caught:
        await app.start(ServerConfig(host=host, port=0, device="cpu", insecure=True))
    assert problem in caught.value.message
    assert "another server" not in caught.value.message


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert why_not_bound("127.0.0.1", taken.getsockname()[1]) == "is another server running there?"
