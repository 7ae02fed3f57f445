"""The commands of the analyses over NumPy models: paths and options in, tables, JSON and pictures out."""

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import typer

import trocar
from tests.unit.client._analysis.fake_client import FakeClient, FakeModels
from trocar._base.tensors import Array
from trocar._cli.commands.analysis.cka_command import cka
from trocar._cli.commands.analysis.compare_command import compare
from trocar._cli.commands.analysis.dead_command import dead
from trocar._cli.commands.analysis.fid_command import fid
from trocar._cli.options.input_sets import analysing, check_plot, read_set
from trocar._sync.analysis.analyses import Analyses

MODELS = {
    "a": {"conv": lambda x: x * 2, "relu": lambda x: np.maximum(x, 0), "avgpool": lambda x: x[:, :, 0, 0]},
    "b": {"conv": lambda x: x * 2, "relu": lambda x: np.maximum(x, -1), "avgpool": lambda x: x[:, :, 1, 1]},
}


class Client(FakeClient):
    """A client with the methods that the commands call."""

    fid = trocar.Client.fid
    cka = trocar.Client.cka
    dead_channels = trocar.Client.dead_channels
    diff = trocar.Client.diff

    def __init__(self, fake: FakeModels) -> None:
        super().__init__(fake)
        this: Any = self
        self._analyses = Analyses(this, this)

    def model(self, model_id: str) -> trocar.Model:
        return trocar.Model(
            model_id, "loaded", "custom", "", "", 0, 0, "cpu", "float64", None, (), input_shape=(3, 4, 4)
        )


@pytest.fixture
def client() -> Any:
    return Client(FakeModels(MODELS))


def images(seed: int, count: int = 10) -> Array:
    x = np.random.default_rng(seed).standard_normal((count, 3, 4, 4))
    x[:, 2] = -abs(x[:, 2])  # dead behind a ReLU
    return x


@pytest.fixture
def path(tmp_path: Path) -> str:
    np.save(tmp_path / "x.npy", images(0))
    return str(tmp_path / "x.npy")


@pytest.fixture
def other_path(tmp_path: Path) -> str:
    np.save(tmp_path / "y.npy", images(1))
    return str(tmp_path / "y.npy")


def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_fid_prints_what_the_client_returns(
    client: Any, path: str, other_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fid(client, "a", path, other_path, batch=4, as_json=True)
    expected = client.fid("a", images(0), images(1))
    assert shown(capsys)["distance"] == pytest.approx(expected.distance, rel=1e-12)
    fid(client, "a", path, other_path)
    assert capsys.readouterr().out == f"{expected}\n"


def test_cka_prints_and_draws(
    client: Any, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    cka(
        client, "a", [path], tap=["conv", "avgpool"], other="b", other_tap=["relu"], plot=tmp_path / "cka.png"
    )
    expected = client.cka("a", images(0), ["conv", "avgpool"], other="b", other_taps=["relu"])
    assert capsys.readouterr().out == f"{expected}\n"
    assert (tmp_path / "cka.png").read_bytes().startswith(b"\x89PNG")
    cka(client, "a", [path], tap=["conv"], debiased=True, as_json=True)
    found = shown(capsys)
    assert (found["rows"], found["debiased"]) == (["conv"], True)
    assert found["matrix"] == [[pytest.approx(1.0)]]


def test_dead_prints_and_draws(
    client: Any, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    dead(client, "a", [path, path], batch=3, plot=tmp_path / "dead.png")
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 9 channels of 3 feature maps are dead"
    assert (tmp_path / "dead.png").exists()
    dead(client, "a", [path], tap=["relu"], threshold=1e9, as_json=True)
    assert [row["dead"] for row in shown(capsys)["rows"]] == [[0, 1, 2]]


def test_a_comparison_of_other_names_prints_and_draws(
    client: Any, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    both: Any = {"other": "b", "tap": ["conv"], "tap_other": ["relu"]}
    compare(client, "a", [path], **both, plot=tmp_path / "diff.png", batch=4)
    assert "a and b: first diverging: conv" in capsys.readouterr().out
    assert (tmp_path / "diff.png").exists()
    compare(client, "a", [path], **both, as_json=True)
    found = shown(capsys)
    assert (found["rows"][0]["name_b"], found["first_diverging"]["name"]) == ("relu", "conv")


def test_no_divergence_is_null_in_json(client: Any, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    compare(client, "a", [path], other="b", tap=["conv"], tap_other=["conv"], as_json=True)
    assert shown(capsys)["first_diverging"] is None


def test_folders_stand_for_their_images(client: Any, tmp_path: Path, path: str) -> None:
    for name in ("photos/b.png", "photos/sub/a.jpg", "photos/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    samples = read_set(client, "a", [tmp_path / "photos", path])
    assert [Path(sample.name).name for sample in samples][:3] == ["b.png", "a.jpg", "x.npy[0]"]


def test_a_folder_without_images_is_a_usage_error(client: Any, tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="has no images"):
        read_set(client, "a", [tmp_path])


def test_what_an_analysis_refuses_is_a_usage_error_with_its_notes(client: Any, path: str) -> None:
    def refused() -> NoReturn:
        error = ValueError("they differ")
        error.add_note("in x.npy[0]")
        raise error

    samples = read_set(client, "a", [path])
    with pytest.raises(typer.BadParameter, match="they differ\nin x"), analysing(2, x=samples):
        refused()


def test_a_batch_that_fails_is_named_by_its_files(client: Any, path: str) -> None:
    client.fake.failing = {("a", 1): trocar.errors.InputRejectedError("too small")}
    with pytest.raises(trocar.errors.InputRejectedError) as caught:
        dead(client, "a", [path], batch=4)
    assert caught.value.__notes__ == [f"in {path}[4] to {path}[7], a"]


@pytest.mark.parametrize(("name", "message"), [("x.docx", "must end in one of"), ("no/x.png", "no folder")])
def test_a_picture_that_cannot_be_written_is_refused_first(tmp_path: Path, name: str, message: str) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(typer.BadParameter, match=message):
        check_plot(tmp_path / name)


def test_a_picture_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(typer.Exit) as caught:
        check_plot(tmp_path / "x.png")
    assert caught.value.exit_code == 2
    assert 'pip install "trocar[plot]"' in capsys.readouterr().err
