"""Predictions by name, against torch's softmax and topk in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

import trocar
from tests.support.models import text_models, tiny_models
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt
from trocar._cli import main

NAMES = ("cat", "cup", "dog", "car", "cow")
PLAIN: dict[str, Any] = {
    **custom(tiny_models.Plain, (3, 8, 8)),
    "categories": NAMES,
    "preprocessing": {"resize": (), "crop": (), "mean": (0.5,) * 3, "std": (0.5,) * 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_models.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    classifier = {
        "factory": f"{text_models.__name__}:bert_classifier",
        "input_shape": (4,),
        "processor": folder,
        "categories": ("sad", "so-so", "glad"),
    }
    models = {
        "plain": PLAIN,
        "unnamed": custom(tiny_models.Plain, (3, 8, 8)),
        "misnamed": {**custom(tiny_models.Plain, (3, 8, 8)), "categories": ("one", "two")},
        "structured": custom(tiny_models.Structured, (3,)),
        "half": custom(tiny_models.Half, (7,)),
        "moods": classifier,
    }
    with running_server(models=models, device="cpu") as running:
        yield running


def images(count: int = 7) -> Any:
    return np.random.default_rng(1).normal(size=(count, 3, 8, 8)).astype(np.float32)


def torch_topk(scores: torch.Tensor, k: int) -> tuple[list[list[float]], list[list[int]]]:
    found = scores.double().softmax(1).topk(k)
    return found.values.tolist(), found.indices.tolist()


def test_classes_and_scores_are_those_of_torch(client: trocar.Client) -> None:
    x = images()
    with torch.inference_mode():
        values, numbers = torch_topk(rebuilt(tiny_models.Plain)(torch.from_numpy(x)), 3)
    found = client.predict("plain", x, top=3, batch_size=3)
    assert [[one.number for one in row] for row in found] == numbers
    assert np.allclose([[one.score for one in row] for row in found], values, rtol=1e-6)
    assert [row.name for row in found] == [NAMES[row[0]] for row in numbers]
    assert [row.sample for row in found] == [f"sample {i}" for i in range(7)]


def test_all_classes_where_there_are_fewer_and_their_probabilities_sum_to_one(client: trocar.Client) -> None:
    found = client.predict("plain", images(2), top=1000)
    assert [len(row) for row in found] == [5, 5]
    assert sum(one.score for one in found[0]) == pytest.approx(1)


def test_sigmoid_and_none_are_those_of_torch(client: trocar.Client) -> None:
    x = images(2)
    with torch.inference_mode():
        logits = rebuilt(tiny_models.Plain)(torch.from_numpy(x)).double()
    for activation, scores in (("sigmoid", logits.sigmoid()), ("none", logits)):
        found = client.predict("plain", x, top=5, activation=activation)  # type: ignore[arg-type]
        best = scores.topk(5).values
        assert np.allclose([[one.score for one in row] for row in found], best, rtol=1e-6)


def test_classes_without_names_are_numbers(client: trocar.Client) -> None:
    first = client.predict("unnamed", images(1))[0]
    assert first.name == ""
    assert first.top.label == f"class {first.top.number}"


def test_a_folder_names_its_samples(client: trocar.Client, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8), "teal").save(tmp_path / name)
    found = client.predict("plain", tmp_path, top=2)
    assert [row.sample for row in found] == [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    assert found[str(tmp_path / "b.png")].classes == found[1].classes
    assert str(found).splitlines()[1].split()[1] == found[0].name
    assert found[0].name in found._repr_html_()


def test_texts_are_classified_by_the_models_own_logits(client: trocar.Client, folder: Path) -> None:
    texts = ["the cat sat", "a dog sat on the mat", "hello"]
    encoding = AutoTokenizer.from_pretrained(str(folder))(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        values, numbers = torch_topk(text_models.bert_classifier()(**encoding).logits, 3)
    found = client.predict("moods", texts, top=3)
    assert [[one.number for one in row] for row in found] == numbers
    assert np.allclose([[one.score for one in row] for row in found], values, rtol=1e-5)
    assert [row.sample for row in found] == texts
    assert client.predict("moods", "the cat sat", top=3)[0].top.name == found[0].top.name


def test_an_edit_changes_the_prediction_as_in_torch(client: trocar.Client) -> None:
    x, model = images(3), rebuilt(tiny_models.Plain)
    model.fc.register_forward_hook(lambda module, args, value: value * -3)
    with torch.inference_mode():
        values, numbers = torch_topk(model(torch.from_numpy(x)), 2)
    found = client.predict("plain", x, top=2, edits=trocar.edit("fc", "scale", -3.0))
    assert [[one.number for one in row] for row in found] == numbers
    assert np.allclose([[one.score for one in row] for row in found], values, rtol=1e-6)


def test_an_output_that_is_no_classification_is_named(client: trocar.Client) -> None:
    with pytest.raises(ValueError, match=r'structured .* several values: /out\["out"\] float32 \(1, 3\)'):
        client.predict("structured", np.zeros((1, 3), np.float32))
    with pytest.raises(
        trocar.errors.ModelNotLoadedError, match="categories has 2 names, and the model 5 outputs"
    ):
        client.predict("misnamed", images(1))
    with pytest.raises(ValueError, match=r'softmax is always 1; activation="sigmoid"'):
        client.predict("half", np.zeros((7, 1), np.float32))


def test_a_nan_is_no_class(client: trocar.Client) -> None:
    x = images(3)
    x[1] = np.nan
    with pytest.raises(ValueError, match="sample 1: the output of plain has NaN"):
        client.predict("plain", x)


@pytest.mark.parametrize("top", [0, -1, True, 2.0])
def test_top_is_a_positive_integer(client: trocar.Client, top: Any) -> None:
    with pytest.raises(ValueError, match="top="):
        client.predict("plain", images(1), top=top)


def test_asyncio_is_the_same(server: RunningServer, client: trocar.Client) -> None:
    async def predicted() -> trocar.Predictions:
        async with trocar.aio.connect(server.address) as connected:
            return await connected.predict("plain", images(2))

    assert asyncio.run(predicted()) == client.predict("plain", images(2))


def trocar_command(
    server: RunningServer, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, words), "--server", server.address])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_the_command_prints_names_and_json(
    server: RunningServer, client: trocar.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8), "teal").save(path)
    expected = client.predict("plain", path, top=2)
    code, out, _ = trocar_command(server, capsys, "predict", "plain", path, "--top", 2)
    assert code == 0
    assert expected[0].name in out
    code, out, _ = trocar_command(server, capsys, "predict", "plain", path, "--top", 2, "--json")
    found = json.loads(out)
    assert found["samples"][0]["sample"] == str(path)
    assert [one["name"] for one in found["samples"][0]["classes"]] == [one.name for one in expected[0]]


def test_the_command_takes_texts_and_refuses_what_is_no_classification(
    server: RunningServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = trocar_command(server, capsys, "predict", "moods", "--text", "the cat sat", "--json")
    assert code == 0
    assert json.loads(out)["samples"][0]["sample"] == "the cat sat"
    np.save(tmp_path / "x.npy", np.zeros((1, 3), np.float32))
    code, _, err = trocar_command(server, capsys, "predict", "structured", tmp_path / "x.npy")
    assert code == 2
    assert "returns no scores of classes" in " ".join(err.split())
    code, _, err = trocar_command(server, capsys, "predict", "plain")
    assert code == 2
    assert "IMAGES or texts" in err


def test_a_published_head_has_the_names_of_the_folders(client: trocar.Client, tmp_path: Path) -> None:
    for index, name in enumerate(("cats", "dogs", "emus")):
        (tmp_path / name).mkdir()
        for copy in range(2):
            Image.new("RGB", (8, 8), (80 * index, 10 * copy, 0)).save(tmp_path / name / f"{copy}.png")
    with client.train("plain", head=3, trainable=["fc"]) as trainer:
        trainer.fit(client.upload_dataset(tmp_path), epochs=1, batch_size=6)
        trainer.publish("animals")
    try:
        assert client.model("animals").categories == ("cats", "dogs", "emus")
        assert client.predict("animals", tmp_path / "cats")[0].name in ("cats", "dogs", "emus")
    finally:
        client.unpublish("animals")
