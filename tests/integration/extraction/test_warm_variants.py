"""Compiled variants of the configuration, which are there before the first call."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

import trocar
from tests.support.models.tiny_models import DataDependent, Plain
from tests.support.oracles.oracle import noise
from tests.support.servers.building import build_here_from_the_start
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from trocar_server.config import read_config
from trocar_server.engine.compiled.backends import build_worker
from trocar_server.errors import ServiceError

IMAGES = noise(1, 3, 8, 8)
WANTED = {"taps": ["conv", "fc"], "numerics": "fast"}


@pytest.fixture(autouse=True)
def _fast_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    build_here_from_the_start(monkeypatch)


@contextmanager
def server_of(
    *wanted: Any, kind: Any = Plain, shape: tuple[int, ...] = (3, 8, 8), min_gain: float = 0.0, **options: Any
) -> Iterator[RunningServer]:
    models = {"plain": custom(kind, shape, warm_variants=wanted)}
    with running_server(
        models=models, device="cpu", engine={"compile_after": 100, "min_gain": min_gain}, **options
    ) as server:
        yield server


def test_the_first_call_runs_on_it_and_the_next_process_builds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with server_of(WANTED, data_dir=tmp_path) as server, trocar.connect(server.address) as client:
            found = client.extract("plain", IMAGES, ["conv", "fc"], options=trocar.options(numerics="fast"))
            exact = client.extract("plain", IMAGES, ["conv", "fc"])
            server.run(server.engine.compiled.settled)
            again = client.extract("plain", IMAGES, ["conv", "fc"], options=trocar.options(numerics="fast"))
        assert found.execution.engine != "eager"
        assert found.execution == again.execution
        for name, value in exact.items():
            assert np.linalg.norm(found[name] - value) <= 1e-5 * np.linalg.norm(value)
        monkeypatch.setattr(build_worker, "build", None)


def test_a_model_that_a_client_loads_again_has_it(tmp_path: Path) -> None:
    with server_of(WANTED, data_dir=tmp_path) as server, trocar.connect(server.address) as client:
        client.unload("plain")
        client.load("plain")
        found = client.extract("plain", IMAGES, ["conv", "fc"], options=trocar.options(numerics="fast"))
    assert found.execution.engine != "eager"


def test_a_model_that_replaces_another_gets_it_in_the_background() -> None:
    with server_of(WANTED) as server, trocar.connect(server.address) as client:
        deployments = server.engine.deployments
        spec = replace(server.engine.catalogue.get("plain").spec, weights="random:1")

        async def reload() -> None:
            deployments.replace(await deployments.build(spec, 1), 1)
            await server.engine.compiled.settled()

        before = client.extract("plain", IMAGES, ["conv", "fc"], options=trocar.options(numerics="fast"))
        server.run(reload)
        after = client.extract("plain", IMAGES, ["conv", "fc"], options=trocar.options(numerics="fast"))
        exact = client.extract("plain", IMAGES, ["conv", "fc"])
    assert after.execution.engine != "eager"
    assert np.linalg.norm(after["fc"] - exact["fc"]) <= 1e-5 * np.linalg.norm(exact["fc"])
    assert not np.allclose(after["fc"], before["fc"])


@pytest.mark.parametrize(
    ("tap", "words"),
    [("conv9", "no module 'conv9'"), ("fn:relu", "always run exactly"), ("conv@x", "conv@x")],
)
def test_a_value_that_the_model_does_not_have_fails_the_start_in_words(tap: str, words: str) -> None:
    with (
        pytest.raises(ServiceError, match="its warm variant of") as caught,
        server_of({"taps": [tap], "numerics": "fast"}),
    ):
        pass
    assert words in caught.value.message
    assert "'plain'" in caught.value.message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('taps = ["fc"], numerics = "exact"', "must be one of fast, bf16, not 'exact'"),
        ('taps = [], numerics = "fast"', "warm_variants.0.taps"),
        ('taps = ["fc"]', "warm_variants.0.numerics"),
        ('tap = ["fc"], numerics = "fast"', "nearest: taps"),
    ],
)
def test_a_wrong_setting_is_told_when_it_is_read(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(f"[models.resnet18]\nwarm_variants = [{{ {line} }}]\n")
    with pytest.raises(ServiceError) as caught:
        read_config(file)
    assert words in caught.value.message


def test_one_that_is_no_faster_is_told_and_the_model_is_served() -> None:
    running = server_of(WANTED, min_gain=1e9)
    with capture_logs() as lines, running as server, trocar.connect(server.address) as client:
        found = client.extract("plain", IMAGES, ["conv", "fc"], options=trocar.options(numerics="fast"))
    assert found.execution.engine == "eager"
    (line,) = (line for line in lines if line["event"] == "no warm variant")
    assert (line["model_id"], line["values"], line["log_level"]) == ("plain", ["conv", "fc"], "warning")
    assert "no compiled pass qualified" in line["problem"]


def test_a_model_that_cannot_be_compiled_is_told_and_served() -> None:
    wanted = {"taps": ["/out"], "numerics": "bf16"}
    running = server_of(wanted, kind=DataDependent, shape=(3,))
    with capture_logs() as lines, running as server, trocar.connect(server.address) as client:
        found = client.extract("plain", noise(1, 3), "/out", options=trocar.options(numerics="bf16"))
    assert found.execution.engine == "eager"
    (line,) = (line for line in lines if line["event"] == "no warm variant")
    assert "cannot be compiled" in line["problem"]
