"""Compiled variants that a server keeps for the next one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.oracles.oracle import noise
from tests.support.servers.building import build_here
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from trocar_server.engine.compiled.backends import build_worker

IMAGES = noise(2, 3, 8, 8)
TAPS = ["conv", "fc/in", "fc"]
ENGINE = {"compile_after": 1, "min_gain": 0.0}


@contextmanager
def server_of(
    folder: Path, weights: str = "random:0", fields: Any = None, **engine: Any
) -> Iterator[RunningServer]:
    models = {"plain": {**custom(Plain, (3, 8, 8), weights=weights), **(fields or {})}}
    with running_server(models=models, device="cpu", data_dir=folder, engine={**ENGINE, **engine}) as server:
        yield server


def call(server: RunningServer, numerics: trocar.Numerics | None = None) -> trocar.FeatureMaps:
    with trocar.connect(server.address) as client:
        return client.extract("plain", IMAGES, TAPS, options=trocar.options(numerics=numerics))


def settle(server: RunningServer) -> None:
    server.run(server.engine.compiled.settled)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the data directory of a server that has built a variant and is gone."""
    folder = tmp_path_factory.mktemp("data")
    with server_of(folder) as server:
        build_here(server)
        for _ in range(4):
            call(server, numerics="fast")
            settle(server)
        assert call(server, numerics="fast").execution.engine != "eager"
    return folder


@pytest.fixture
def data_dir(built: Path, tmp_path: Path) -> Path:
    """Return a data directory with a copy of that variant."""
    (kept,) = (built / "compiled").iterdir()
    copy = tmp_path / "compiled" / kept.name
    copy.mkdir(parents=True, mode=0o700)
    for file in kept.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return tmp_path


def kept_in(folder: Path) -> list[str]:
    return [path.name for path in (folder / "compiled").iterdir()]


@pytest.fixture
def no_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be built: what is in use was kept."""

    def build(_: object) -> None:
        raise AssertionError("a variant is built")

    monkeypatch.setattr(build_worker, "build", build)


@pytest.mark.usefixtures("no_builds")
def test_the_first_call_after_a_restart_runs_on_a_kept_variant(data_dir: Path) -> None:
    with server_of(data_dir) as server:
        build_here(server)
        found = call(server, numerics="fast")
        exact = call(server)
        settle(server)
        assert call(server, numerics="fast").execution == found.execution
    assert found.execution.engine != "eager"
    assert (found.execution.asked, exact.execution.engine) == ("fast", "eager")
    for name, value in exact.items():
        assert np.linalg.norm(found[name] - value) <= 1e-5 * np.linalg.norm(value)


def test_of_a_damaged_one_nothing_is_used_and_it_is_built_anew(data_dir: Path) -> None:
    (key,) = kept_in(data_dir)
    weights = data_dir / "compiled" / key / "graph.bin"
    if not weights.exists():
        pytest.skip("without OpenVINO there are no files")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with capture_logs() as lines, server_of(data_dir) as server:
        assert not kept_in(data_dir)
        build_here(server)
        assert call(server, numerics="fast").execution.engine == "eager"
        for _ in range(3):
            settle(server)
            call(server, numerics="fast")
        settle(server)
        assert call(server, numerics="fast").execution.engine != "eager"
    assert [line["problem"] for line in lines if line["event"] == "kept variant removed"] == [
        "the sha256 of graph.bin does not match"
    ]
    assert kept_in(data_dir) == [key]


def test_a_model_with_other_weights_does_not_use_it(data_dir: Path) -> None:
    with server_of(data_dir, "random:1") as server:
        build_here(server)
        assert call(server, numerics="fast").execution.engine == "eager"
        settle(server)
    with server_of(data_dir) as server:  # it is still there for its own
        assert call(server, numerics="fast").execution.engine != "eager"


@pytest.mark.parametrize(
    ("fields", "is_used"),
    [
        ({"stages": {"early": "conv"}}, False),
        ({"numerics": "bf16"}, False),
        ({"preprocessing": {"crop": [8]}}, False),
        ({"categories": list("abcde")}, True),
        ({"merge": "everybody"}, True),
    ],
)
def test_it_belongs_to_the_model_as_configured(data_dir: Path, fields: Any, is_used: bool) -> None:
    with server_of(data_dir, fields=fields) as server:
        build_here(server)
        assert (call(server, numerics="fast").execution.engine != "eager") is is_used
        settle(server)


def test_one_that_is_too_far_from_eager_is_removed(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trocar_server.engine.compiled import variant_building

    monkeypatch.setattr(variant_building, "problem_of", lambda *_: "other values")
    with capture_logs() as lines, server_of(data_dir) as server:
        build_here(server)
        assert call(server, numerics="fast").execution.engine == "eager"
        settle(server)
    assert not kept_in(data_dir)
    assert "other values" in [line.get("problem") for line in lines]


def test_one_that_differs_on_the_first_batch_of_a_caller_is_not_used_again(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_of(data_dir) as server:
        (variant,) = server.engine.compiled.variants()
        runner = variant.runner
        assert runner is not None
        run = runner.run
        monkeypatch.setattr(
            runner, "run", lambda *given: {name: value + 1 for name, value in run(*given).items()}
        )
        call(server, numerics="fast")
        settle(server)
        assert call(server, numerics="fast").execution.engine == "eager"
    assert not kept_in(data_dir)


def test_a_model_that_is_loaded_again_has_its_variant(data_dir: Path) -> None:
    with server_of(data_dir) as server, trocar.connect(server.address) as client:
        client.unload("plain")
        client.load("plain")
        assert (
            client.extract("plain", IMAGES, TAPS, options=trocar.options(numerics="fast")).execution.engine
            != "eager"
        )


def test_without_room_nothing_is_kept_or_used(data_dir: Path) -> None:
    with server_of(data_dir, kept_variants_bytes=0) as server:
        build_here(server)
        assert call(server, numerics="fast").execution.engine == "eager"
        settle(server)
