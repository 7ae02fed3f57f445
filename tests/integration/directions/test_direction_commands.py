"""`trocar probe` and `trocar steer`, and directions of other libraries, against a server."""

# scikit-learn has no types.
# pyright: reportMissingTypeStubs=false

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import trocar
from tests.support.models.causal_models import save_causal
from tests.support.models.transformers_folders import save_family, save_image_processor
from tests.support.servers.running_server import RunningServer, running_server
from trocar._cli.app import main

PROMPT = "The river ran past the mill"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("commands")
    save_family("vit", folder / "vit")
    save_image_processor("vit", folder / "vit")
    save_causal("llama", folder / "llama")
    models = {name: {"source": f"hf:{folder / name}"} for name in ("vit", "llama")}
    with running_server(models=models, device="cpu") as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(server.address) as connected:
        yield connected


def run(server: RunningServer, *words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--server", server.address])
    return int(ended.value.code or 0)


def digits(folder: Path) -> Path:
    """Write a folder for each of two digits."""
    data: Any = load_digits()
    for digit in (0, 1):
        (folder / f"digit-{digit}").mkdir(parents=True)
        for index, image in enumerate(data.images[data.target == digit][:20]):
            pixels = Image.fromarray((image * 15).astype(np.uint8)).convert("RGB")
            pixels.save(folder / f"digit-{digit}" / f"{index:02}.png")
    return folder


def test_probe_tells_the_layer_that_separates_two_classes(
    server: RunningServer, client: trocar.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = digits(tmp_path / "data")
    words = ("probe", "vit", str(folder), "--name", "zero-or-one", "--plot", str(tmp_path / "scores.png"))
    assert run(server, *words) == 0
    shown = capsys.readouterr().out
    assert "zero-or-one: logistic of 40 samples at 2 places of vit" in shown
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")
    assert run(server, *words[:-2], "--replace", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    fitted = client.fit_direction("vit", str(folder))  # labels of a folder are its subfolders
    assert [row["fold_scores"] for row in rows] == [list(each.fold_scores) for each in fitted]
    assert fitted.rows[0].classes == ("digit-0", "digit-1")
    assert fitted.best.score == max(row["score"] for row in rows) > 0.9
    assert run(server, *words) == 1
    assert "already exist" in capsys.readouterr().err


def test_steer_shows_a_text_with_and_without_a_direction(
    server: RunningServer, client: trocar.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, lines in (
        ("rivers", ["a river", "the stream", "wide water"]),
        ("hills", ["a hill", "the top", "stone"]),
    ):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    files = [str(tmp_path / f"{name}.txt") for name in ("rivers", "hills")]
    options = ("--kind", "mean_difference", "--last", "--folds", "0", "--name", "rivers")
    assert run(server, "probe", "llama", *files, *options) == 0
    assert [each.classes for each in client.directions("llama")] == [("hills", "rivers")] * 2
    capsys.readouterr()
    words = ("steer", "llama", PROMPT, "--with", "rivers", "--at", "layer[1]", "--max-new-tokens", "8")
    assert run(server, *words, "--alpha", "3", "--units", "norm", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    edit = trocar.edit("layer[1]", "steer", "rivers", alpha=3, units="norm")
    assert shown["plain"] == client.generate("llama", PROMPT, max_new_tokens=8).text
    assert shown["steered"] == client.generate("llama", PROMPT, max_new_tokens=8, edits=[edit]).text
    assert shown["edit_counts"][0]["generated"] == 7
    assert run(server, *words, "--project-out") == 0
    assert "--- with rivers\n" in capsys.readouterr().out
    assert run(server, *words, "--units", "percent") == 2


def test_probe_says_what_it_needs(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("a\nb\n")
    assert run(server, "probe", "llama", str(tmp_path / "one.txt")) == 2
    assert "a .txt file for each of two classes" in capsys.readouterr().err
    assert run(server, "probe", "llama", str(tmp_path), str(tmp_path / "one.txt"), "--kind", "pca") == 2
    assert "--kind" in capsys.readouterr().err


def test_vectors_of_other_libraries(client: trocar.Client) -> None:
    class SteeringVector:  # of steering-vectors: a mapping from block to vector
        def __init__(self) -> None:
            self.layer_activations = {layer: np.full(16, layer + 1.0, np.float32) for layer in (0, 1)}

    for layer, each in trocar.Direction.of_layers(SteeringVector()).items():
        client.store_direction("llama", "full", f"layer[{layer}]", each)
    assert len(client.directions("llama")) >= 2
    maps = client.extract("llama", PROMPT, [trocar.readout("full", "layer[1]"), "layer[1]"])
    np.testing.assert_allclose(
        maps["model.layers.1:full"][..., 0], maps["model.layers.1"].sum(-1) * 2, rtol=1e-4, atol=1e-5
    )
    with pytest.raises(TypeError, match="no vectors by block"):
        trocar.Direction.of_layers([1.0])
