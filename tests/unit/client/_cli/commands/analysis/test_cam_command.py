"""`trocar cam` over torch modules in this process: files in, pictures, tables and JSON out."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.oracles.torch_client import TorchClient
from trocar._base.tensors import Array
from trocar._cli.commands.analysis.cam_command import _objective, cam
from trocar._cli.options.choices import CamMethod

NAMES = ("ant", "bee", "Cat", "dog", "dog")


class Client(TorchClient):
    """One whose models take arrays of known rank."""

    def model(self, model_id: str) -> trocar.Model:
        described = super().model(model_id)
        return trocar.Model(**{**vars(described), "input_shape": (3, 12, 10)})


@pytest.fixture
def client() -> Any:
    torch.manual_seed(0)
    return Client({"m": Plain().eval()}, NAMES)


def rows(count: int = 3) -> Array:
    return np.random.default_rng(0).standard_normal((count, 3, 12, 10)).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path) -> str:
    np.save(tmp_path / "x.npy", rows())
    return str(tmp_path / "x.npy")


def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_picture_and_what_is_in_it(
    client: Any, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cam.png"
    cam(client, "m", [path], out=out, at="conv2", batch=2)
    expected = client.grad_cam("m", rows(), "conv2")
    text = capsys.readouterr().out
    for name in expected.class_names:
        assert name in text
    assert f"wrote {out}" in text
    with Image.open(out) as picture:
        assert min(picture.size) > 300


def test_json_has_class_name_and_score(
    client: Any, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cam.png"
    cam(client, "m", [path], out=out, at="conv2", class_="bee", batch=2, as_json=True)
    found, expected = shown(capsys), client.grad_cam("m", rows(), "conv2", trocar.logit(1))
    assert (found["method"], found["at"], found["out"]) == ("grad_cam", "conv2", [str(out)])
    assert [row["class"] for row in found["images"]] == [1, 1, 1]
    assert found["images"][2]["image"] == f"{path}[2]"
    np.testing.assert_allclose([row["score"] for row in found["images"]], expected.scores, rtol=1e-6)


@pytest.mark.parametrize("method", list(CamMethod))
def test_every_method_draws(client: Any, path: str, tmp_path: Path, method: CamMethod) -> None:
    needs_module = method in (CamMethod.GRAD_CAM, CamMethod.GRAD_CAM_PLUS_PLUS, CamMethod.LAYER_CONDUCTANCE)
    cam(client, "m", [path], out=tmp_path / "x.png", method=method, at="conv" if needs_module else None)
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_options_reach_the_method(
    client: Any, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["window=[3, 12, 10]", "stride=1", "baseline=0.5"]
    cam(client, "m", [path], out=tmp_path / "x.png", method=CamMethod.OCCLUSION, option=options)
    assert client.batch_sizes == [3, 3]  # the classes and their scores, then one window


def test_a_folder_gets_a_picture_of_each_image(
    client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a/x.npy", "b/x.npy"):
        (tmp_path / name).parent.mkdir()
        np.save(tmp_path / name, rows(1)[0])
    out = tmp_path / "pictures"
    cam(client, "m", [str(tmp_path / "a/x.npy"), str(tmp_path / "b/x.npy")], out=out, at="conv", as_json=True)
    assert shown(capsys)["out"] == [str(out / "x.npy.png"), str(out / "x.npy-2.png")]
    assert sorted(file.name for file in out.iterdir()) == ["x.npy-2.png", "x.npy.png"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"class_": "be"}, "in the names of: bee"),
        ({"class_": "bear"}, "nearest: bee"),
        ({"class_": "dog"}, "is the name of 3, 4; give a number"),
        ({"class_": "-1"}, "no class -1; they are numbered from 0"),
        ({"option": ["steps"]}, "is not NAME=VALUE"),
        ({"option": ["of=3"]}, "is not NAME=VALUE"),
        ({"option": ["steps=3"]}, "grad_cam has no option 'steps'"),
        ({"at": "fc"}, "no spatial positions"),
        ({"at": "conv", "method": CamMethod.OCCLUSION}, "is not used"),
    ],
)
def test_what_cannot_be_drawn_is_a_usage_error(
    client: Any, path: str, tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        cam(client, "m", [path], **{"out": tmp_path / "x.png", "at": "conv", **given})
    assert not (tmp_path / "x.png").exists()


def test_names_are_found_whatever_their_case(
    client: Any, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cam(client, "m", [path], out=tmp_path / "x.png", at="conv", class_="cAT", as_json=True)
    assert {row["name"] for row in shown(capsys)["images"]} == {"Cat"}


def test_too_many_images_for_one_picture_are_refused_before_they_are_sent(
    client: Any, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", rows(65))
    with pytest.raises(typer.BadParameter, match="need a folder"):
        cam(client, "m", [str(tmp_path / "x.npy")], out=tmp_path / "x.png", at="conv")
    assert client.batch_sizes == []


def test_without_matplotlib_nothing_is_computed(
    client: Any,
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(typer.Exit) as caught:
        cam(client, "m", [path], out=tmp_path / "x.png", at="conv")
    assert caught.value.exit_code == 2
    assert '--out needs matplotlib: pip install "trocar[plot]"' in capsys.readouterr().err
    assert client.batch_sizes == []


@pytest.mark.parametrize(("wanted", "number"), [("2", 2), ("0", 0), ("cat", 2)])
def test_a_class_is_given_by_its_number_or_name(client: Any, wanted: str, number: int) -> None:
    assert _objective(client, "m", wanted) == trocar.logit(number)
