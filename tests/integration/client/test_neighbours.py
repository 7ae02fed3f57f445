"""Nearest samples through a real model, and in a folder of its features; the oracle is scikit-learn."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from sklearn.neighbors import NearestNeighbors

import trocar
from tests.support.models.text_models import minilm_folder
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.running_server import RunningServer, running_server
from trocar._cli import main
from trocar.errors import NotFoundError
from trocar_server.config import ModelConfig

MODELS = {
    "resnet18": ModelConfig(weights="random:0"),
    "other": ModelConfig(architecture="resnet18", weights="random:1"),
    "mini": ModelConfig(source=f"hf:{minilm_folder()}"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(models=MODELS) as running:
        yield running


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(9):
        pixels = rng.integers(0, 255, (6, 8, 3), np.uint8).repeat(16, 0).repeat(16, 1)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def folder(server: RunningServer, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "features"
    pooled = trocar.tap("layer4", reduce=trocar.pool("avg"), alias="pooled")
    taps: list[str | trocar.Tap] = [pooled, "avgpool"]
    with trocar.connect(server.address) as client:
        trocar.extract_dataset(client, "resnet18", str(photos), taps, out, batch=4, shard_size=4)
    return out


def images(count: int = 20, seed: int = 0) -> Array:
    return noise(count, 3, 64, 64, seed=seed)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("at", ["layer2", "fc"])
def test_neighbours_are_those_of_scikit_learn(client: trocar.Client, at: str, metric: Any) -> None:
    x, queries = images(), images(3, seed=1)
    near = client.nearest("resnet18", x, at, queries, k=4, metric=metric, batch_size=7)
    tap = trocar.tap(at, reduce=trocar.pool("avg")) if at == "layer2" else at
    rows, asked = (client.extract("resnet18", one, tap)[at].astype(np.float64) for one in (x, queries))
    distances, indices = (
        NearestNeighbors(n_neighbors=4, metric=metric, algorithm="brute").fit(rows).kneighbors(asked)
    )
    assert near.indices.tolist() == indices.tolist()
    np.testing.assert_allclose(near.distances, distances, rtol=1e-3, atol=1e-6)
    assert near[0][0].key == f"sample {indices[0, 0]}"


def test_a_vector_takes_the_place_of_a_query(client: trocar.Client) -> None:
    x = images()
    scores = client.extract("resnet18", x[:2], "fc")["fc"]
    near = client.nearest("resnet18", x, "fc", vector=scores, k=1, metric="euclidean")
    assert near.indices.tolist() == [[0], [1]]
    assert client.nearest("resnet18", x, "fc", vector=scores[1], k=1).indices.tolist() == [[1]]


def test_files_are_named_and_drawn(client: trocar.Client, photos: Path, tmp_path: Path) -> None:
    near = client.nearest("resnet18", photos, "layer4", [photos / "3.png", photos / "7.png"], k=2)
    assert [row[0].key for row in near] == [str(photos / "3.png"), str(photos / "7.png")]
    np.testing.assert_allclose(near.distances[:, 0], 0, atol=1e-6)
    figure = near.plot(tmp_path / "near.png")
    assert sum(bool(axes.images) for axes in figure.axes) == 6
    near.save(tmp_path / "near.csv")
    assert (tmp_path / "near.csv").read_text().splitlines()[0] == "query,rank,index,key,distance"


def test_asyncio_gives_the_same(client: trocar.Client, server: RunningServer) -> None:
    x = images()

    async def run() -> trocar.Neighbours:
        async with trocar.aio.connect(server.address) as other:
            return await other.nearest("resnet18", x, "fc", x[:2], k=3)

    assert (
        asyncio.run(run()).indices.tolist()
        == client.nearest("resnet18", x, "fc", x[:2], k=3).indices.tolist()
    )


def test_samples_of_a_folder_are_near_each_other(folder: Path) -> None:
    features = trocar.read_features(folder)
    near = features.nearest(["3.png", "0.png"], k=3, at="pooled")
    rows = np.asarray(features["pooled"]).astype(np.float64)
    search = NearestNeighbors(n_neighbors=4, metric="cosine", algorithm="brute").fit(rows)
    expected = search.kneighbors(rows[[3, 0]], return_distance=False)[:, 1:]
    assert near.indices.tolist() == expected.tolist()
    assert near.keys[0] == tuple(features.sample_keys[index] for index in expected[0])
    assert near.queries == ("3.png", "0.png")


def test_rows_and_vectors_of_a_folder_are_queries(folder: Path) -> None:
    features = trocar.read_features(folder)
    row = features["avgpool"][5]
    for query in (row, row[None], row.reshape(-1), row.reshape(1, -1), features["avgpool"][5:6]):
        assert features.nearest(query, k=1, at="avgpool").indices.tolist() == [[5]]
    many = features.nearest(features["avgpool"][2:5], k=1, at="avgpool", metric="euclidean")
    assert many.indices.tolist() == [[2], [3], [4]]


def test_an_image_goes_through_the_model_of_the_folder(
    client: trocar.Client, folder: Path, photos: Path, tmp_path: Path
) -> None:
    features = trocar.read_features(folder)
    near = features.nearest(str(photos / "6.png"), k=2, at="avgpool", client=client)
    assert near.keys[0][0] == "6.png"
    np.testing.assert_allclose(near.distances[0, 0], 0, atol=1e-6)
    assert sum(bool(axes.images) for axes in near.plot(tmp_path / "a.png", images=photos).axes) == 3
    same = trocar.tap("layer4", reduce=trocar.pool("avg"), alias="pooled")
    near = features.nearest(str(photos / "6.png"), k=1, at="pooled", client=client, tap=same)
    assert near.keys == (("6.png",),)


def test_other_taps_and_models_are_refused(client: trocar.Client, folder: Path, photos: Path) -> None:
    features, query = trocar.read_features(folder), str(photos / "6.png")
    with pytest.raises(ValueError, match="pass the same tap"):
        features.nearest(query, at="pooled", client=client)
    with pytest.raises(ValueError, match="differs from the folder's"):
        features.nearest(query, at="pooled", client=client, tap=trocar.tap("layer4"))
    features.job = {**features.job, "model": {**features.job["model"], "id": "other"}}
    with pytest.raises(ValueError, match=r"'other' is not the one that made .*\n *model: other .*weights"):
        features.nearest(query, at="avgpool", client=client)
    features.job = {**features.job, "model": {**features.job["model"], "id": "gone"}}
    with pytest.raises(NotFoundError):
        features.nearest(query, at="avgpool", client=client)
    features.job = {**features.job, "edits": []}
    with pytest.raises(ValueError, match="made with edits"):
        features.nearest(query, at="avgpool", client=client)


def test_what_the_folder_does_not_have_is_refused(folder: Path) -> None:
    features = trocar.read_features(folder)
    with pytest.raises(ValueError, match="2 feature maps: pooled, avgpool; choose one"):
        features.nearest("3.png")
    with pytest.raises(KeyError, match="no feature map 'layer9'"):
        features.nearest("3.png", at="layer9")
    with pytest.raises(KeyError, match=r"no sample 'cat\.png'"):
        features.nearest("cat.png", at="pooled")
    with pytest.raises(ValueError, match=r"k=9 exceeds the 8 rows .*the sample itself is left out"):
        features.nearest("3.png", k=9, at="pooled")
    with pytest.raises(ValueError, match="give \\(features,\\)"):
        features.nearest(np.ones((2, 3, 4)), at="pooled")
    with pytest.raises(ValueError, match="7 features, and the rows have 512"):
        features.nearest(np.ones(7), k=1, at="pooled")
    with pytest.raises(TypeError, match="no vector"):
        features.nearest(7, at="pooled")


def test_queries_are_refused_before_the_data_set_runs(client: trocar.Client) -> None:
    x = images(4)
    with pytest.raises(ValueError, match="either query="):
        client.nearest("resnet18", x, "fc")
    with pytest.raises(ValueError, match="metric must be one of"):
        client.nearest("resnet18", x, "fc", x, metric="l2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="matches 2 values"):
        client.nearest("resnet18", x, "layer4.*.conv1", vector=np.ones(512), k=1)
    with pytest.raises(ValueError, match="k=9 exceeds the 4 rows"):
        client.nearest("resnet18", x, "fc", x[:1], k=9)


def test_commands_print_draw_and_save(
    server: RunningServer, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["analyse", *words, "--server", server.address])
        assert ended.value.code == 0
        return capsys.readouterr().out

    query = ("nearest", "resnet18", str(photos), "--query", str(photos / "3.png"), "-k", "2")
    assert "3.png" in run(*query, "--plot", str(tmp_path / "a.png"), "--out", str(tmp_path / "a.csv"))
    assert (tmp_path / "a.png").exists()
    assert (tmp_path / "a.csv").read_text().count("\n") == 3
    assert json.loads(run(*query, "--json"))[0]["neighbours"][0]["key"] == str(photos / "3.png")
    top = ("top", "resnet18", str(photos), "--at", "layer4", "--channel", "31", "-k", "2")
    shown = run(*top, "--plot", str(tmp_path / "b.png"), "--out", str(tmp_path / "b.parquet"), "--widen", "2")
    assert "largest of 9 samples" in shown
    assert (tmp_path / "b.parquet").exists()
    assert [one["rank"] for one in json.loads(run(*top, "--json", "--mean"))["31"]] == [1, 2]
    rsa = ("rsa", "resnet18", str(photos), "--tap", "layer1", "--tap", "layer4")
    assert "RSA" in run(*rsa, "--plot", str(tmp_path / "c.png"), "--rdms")
    assert len(json.loads(run(*rsa, "--json", "--distance", "euclidean"))["matrix"]) == 2


def test_the_command_searches_texts(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, table = tmp_path / "headlines.txt", tmp_path / "near.csv"
    file.write_text("Rain is coming from the north.\nProfits rose by a third.\nThe team won the final.\n")
    near = ("nearest", "mini", "--at", "encoder.layer.5", "--server", server.address, "-k", "1")
    asked = ("--query-text", "It will be wet tomorrow.", "--query-text", "They scored two goals.")
    with pytest.raises(SystemExit) as ended:
        main(["analyse", *near, "--text-file", str(file), *asked, "--json", "--out", str(table)])
    assert ended.value.code == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["neighbours"][0]["index"] for row in rows] == [0, 2]
    assert len(table.read_text().splitlines()) == 3
    for wrong in (asked, ("photos", *asked), ("--text", "a"), ("--text", "a", "--query", "b.png")):
        with pytest.raises(SystemExit) as ended:
            main(["analyse", *near, *wrong])
        assert ended.value.code == 2
        assert "name either IMAGES and --query" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_folder_becomes_one_table(folder: Path, tmp_path: Path, suffix: str) -> None:
    features = trocar.read_features(folder)
    frame = features.to_pandas("pooled")
    assert frame["sample"].tolist() == features.sample_keys
    np.testing.assert_array_equal(frame.drop(columns="sample").to_numpy(), np.asarray(features["pooled"]))
    path = tmp_path / f"features{suffix}"
    features.save(path, ["pooled", "avgpool"])
    read = pd.read_csv(path) if suffix == ".csv" else pd.read_parquet(path)
    assert read.shape == (9, 1 + 2 * 512)
    np.testing.assert_array_equal(
        read["avgpool[7]"].astype(np.float32), np.asarray(features["avgpool"])[:, 7, 0, 0]
    )
    with pytest.raises(KeyError, match="no feature map"):
        features.to_pandas("layer9")
