"""Commands and methods without the library that they need: nothing is computed, sent or written."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from tests.unit.client._export.fakes import FakeClient
from trocar._cli import main
from trocar._result.history import History

ROWS = np.zeros((4, 2, 3), np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    preprocessing = {"resize": (8,), "crop": (8,)}
    with running_server(models={"plain": custom(Plain, (3, 8, 8), preprocessing=preprocessing)}) as running:
        yield running


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / "1.png")
    return tmp_path / "photos"


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Hide a package, as if it were not installed."""
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


def passes(server: RunningServer) -> int:
    with trocar.connect(server.address) as client:
        return len(client.trainers()) + len(client.datasets())


COMMANDS: dict[str, tuple[str, str, list[str]]] = {
    "zarr": (
        "zarr",
        "datasets",
        ["extract", "plain", "PHOTOS", "--tap", "fc", "--out", "OUT", "--format", "zarr"],
    ),
    "parquet": (
        *("pyarrow", "datasets"),
        ["extract", "plain", "PHOTOS", "--tap", "fc", "--out", "OUT", "--format", "parquet"],
    ),
    "decode": (
        "PIL",
        "datasets",
        ["extract", "plain", "PHOTOS", "--tap", "fc", "--out", "OUT", "--decode", "client"],
    ),
    "hf source": ("datasets", "huggingface", ["extract", "plain", "hf:x", "--tap", "fc", "--out", "OUT"]),
    "hf after photos": (
        "datasets",
        "huggingface",
        ["extract", "plain", "PHOTOS", "hf:x", "--tap", "fc", "--out", "OUT"],
    ),
    "hf upload": ("datasets", "huggingface", ["datasets", "upload", "hf:x"]),
    "hf train": ("datasets", "huggingface", ["train", "plain", "hf:x", "--export", "OUT"]),
    "hf eval": ("datasets", "huggingface", ["train", "plain", "PHOTOS", "--eval", "hf:x", "--export", "OUT"]),
    "cam": ("matplotlib", "plot", ["cam", "plain", "IMAGE", "--out", "OUT.png"]),
    "cka": ("matplotlib", "plot", ["analyse", "cka", "plain", "IMAGE", "--tap", "fc", "--plot", "OUT.png"]),
    "dead": ("matplotlib", "plot", ["analyse", "dead", "plain", "IMAGE", "--plot", "OUT.png"]),
    "diff": (
        "matplotlib",
        "plot",
        [
            "compare",
            "plain",
            "IMAGE",
            "--other",
            "plain",
            "--tap-other",
            "fc",
            "--tap",
            "fc",
            "--plot",
            "OUT.png",
        ],
    ),
    "health": ("matplotlib", "plot", ["analyse", "health", "plain", "IMAGE", "--plot", "OUT.png"]),
    "bench": ("matplotlib", "plot", ["bench", "plain", "--plot", "OUT.png"]),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_command_says_what_to_install_and_ends_with_2(
    server: RunningServer,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: str,
) -> None:
    package, extra, words = COMMANDS[case]
    places = {
        "PHOTOS": photos,
        "IMAGE": photos / "a" / "1.png",
        "OUT": tmp_path / "out",
        "OUT.png": tmp_path / "out.png",
    }
    before = passes(server)
    monkeypatch.setenv("TROCAR_SERVER", server.address)
    without(monkeypatch, package)
    with pytest.raises(SystemExit) as stopped:
        main([str(places.get(word, word)) for word in words])
    assert stopped.value.code == 2
    assert f'pip install "trocar[{extra}]"' in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos"]
    assert passes(server) == before


OPTIONS: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "zarr": ("zarr", "datasets", ROWS, {"format": "zarr"}),
    "parquet": ("pyarrow", "datasets", ROWS, {"format": "parquet"}),
    "decode": ("PIL", "datasets", ROWS, {"decode": "client"}),
    "hf": ("datasets", "huggingface", ["x.jpg", "hf:x"], {}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_run_over_a_data_set_says_so_before_it_asks_or_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    package, extra, source, options = OPTIONS[case]
    without(monkeypatch, package)
    client: Any = FakeClient()
    with pytest.raises(trocar.errors.MissingExtraError, match=rf'pip install "trocar\[{extra}\]"'):
        trocar.extract_dataset(client, "m", source, ["code"], tmp_path / "out", **options)
    assert client.calls == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["zarr", "parquet"])
def test_an_output_is_not_read_without_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: Any
) -> None:
    client: Any = FakeClient()
    trocar.extract_dataset(client, "m", ROWS, ["code"], tmp_path / "out", format=format)
    without(monkeypatch, {"zarr": "zarr", "parquet": "pyarrow"}[format])
    with pytest.raises(trocar.errors.MissingExtraError, match=r'pip install "trocar\[datasets\]"'):
        trocar.read_features(tmp_path / "out")


def test_a_fit_says_so_before_anything_is_uploaded(
    server: RunningServer, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "datasets")
    with (
        trocar.connect(server.address) as client,
        client.train("plain", optimizer=trocar.training.sgd(lr=0.1)) as trainer,
    ):
        with pytest.raises(trocar.errors.MissingExtraError, match=r"trocar\[huggingface\]"):
            trainer.fit(str(photos), eval="hf:x", progress=False)
        assert client.datasets() == []


METHODS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "history": ("matplotlib", "plot", lambda out: History([]).plot()),
    "tensorboard": ("tensorboardX", "tensorboard", lambda out: History([]).to_tensorboard(out)),
}


@pytest.mark.parametrize("case", METHODS)
def test_a_method_says_so_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    package, extra, call = METHODS[case]
    without(monkeypatch, package)
    for name in ("_base.figures", "_result.history_plot", "_result.history_tensorboard"):
        monkeypatch.delitem(sys.modules, f"trocar.{name}", raising=False)
    with pytest.raises(ImportError, match=rf'pip install "trocar\[{extra}\]"'):
        call(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_bars_need_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from trocar._result.fit_progress import make_progress
    from trocar._result.fit_progress_rich import RichProgress

    without(monkeypatch, "tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(make_progress(is_wanted=True), RichProgress)
