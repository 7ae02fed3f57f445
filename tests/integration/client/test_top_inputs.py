"""Inputs that drive channels, against the whole values of each sample alone."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trocar
from tests.support.models import text_models
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.running_server import RunningServer, running_server
from trocar_server.config import ModelConfig

MODELS = "tests.support.models.text_models"
TEXTS = ["the cat sat", "a dog sat on the mat and left", "hello", "one two three"]
LAYER = "model.encoder.layer.1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = text_models.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    left = text_models.save_tokenizer(tmp_path_factory.mktemp("left"), padding_side="left")
    models: dict[str, Any] = {
        "resnet18": ModelConfig(weights="random:0"),
        "swin_t": ModelConfig(weights="random:0"),
        "vit_b_16": ModelConfig(weights="random:0"),
        "bert": {"factory": f"{MODELS}:bert", "input_shape": (4,), "processor": folder},
        "gpt": {"factory": f"{MODELS}:gpt", "input_shape": (4,), "processor": left},
    }
    with running_server(models=models) as running:
        yield running


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures whose colours say the pixel: red is the column, green the row."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(5):
        pixels = np.zeros((256, 320, 3), np.uint8)
        pixels[..., 0] = np.arange(320)[None, :] * 255 // 319
        pixels[..., 1] = np.arange(256)[:, None]
        pixels[..., 2] = rng.integers(0, 255, (16, 20)).repeat(16, 0).repeat(16, 1)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def images(count: int = 11) -> Array:
    return noise(count, 3, 64, 64, seed=3)


@pytest.mark.parametrize("batch_size", [1, 4, 11])
def test_samples_are_those_with_the_largest_values(client: trocar.Client, batch_size: int) -> None:
    x = images()
    top = client.top_inputs("resnet18", x, "layer2", [31, 2], k=4, batch_size=batch_size)
    values = np.concatenate([client.extract("resnet18", part[None], "layer2")["layer2"] for part in x])
    for channel in (31, 2):
        largest = values[:, channel].max(axis=(1, 2))
        order = np.argsort(-largest, kind="stable")[:4]
        assert [one.index for one in top[channel]] == order.tolist()
        np.testing.assert_allclose([one.value for one in top[channel]], largest[order], rtol=1e-4)
        for one in top[channel]:
            assert one.place is not None
            own = values[one.index, channel]
            assert one.place.position == np.unravel_index(own.argmax(), own.shape)
            assert one.place.axes == ("height", "width")
    assert [one.rank for one in top[2]] == [1, 2, 3, 4]


def test_all_channels_are_ranked_by_their_mean(client: trocar.Client) -> None:
    x = images()
    top = client.top_inputs("resnet18", x, "layer1", k=2, by="mean")
    means = client.extract("resnet18", x, "layer1")["layer1"].mean(axis=(2, 3))
    assert top.channels == tuple(range(64))
    expected = np.argsort(-means, axis=0, kind="stable")[:2].T
    assert [[one.index for one in row] for row in top] == expected.tolist()


def test_channels_that_are_last_have_places_too(client: trocar.Client) -> None:
    x = images(3)
    top = client.top_inputs("swin_t", x, "features.1", 5, k=1)
    values = client.extract("swin_t", x, "features.1")["features.1"][..., 5]
    sample, *position = map(int, np.unravel_index(values.argmax(), values.shape))
    (one,) = top[5]
    assert one.place is not None
    assert (one.index, one.place.position) == (sample, tuple(position))
    assert one.place.axes == ("height", "width")


def test_patches_have_cells_and_the_class_token_has_none(client: trocar.Client) -> None:
    name, x = "encoder.layers.encoder_layer_0", noise(2, 3, 224, 224)
    top = client.top_inputs("vit_b_16", x, name, k=1)
    values = client.extract("vit_b_16", x, name)[name]
    tokens = values.max(axis=0).argmax(axis=0)
    assert [row[0].place.position for row in top if row[0].place] == [(token,) for token in tokens.tolist()]
    for row, token in zip(top, tokens.tolist(), strict=True):
        assert row[0].place is not None
        cell = row[0].place.cell
        if token == 0:
            assert cell is None
        else:
            assert cell is not None
            assert (cell.row, cell.column) == divmod(token - 1, 14)


def test_values_without_positions_have_no_place(client: trocar.Client) -> None:
    x = images()
    top = client.top_inputs("resnet18", x, "fc", [7], k=20)
    scores = client.extract("resnet18", x, "fc")["fc"][:, 7]
    assert [one.index for one in top[7]] == np.argsort(-scores).tolist()
    assert {one.place for one in top[7]} == {None}


@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize(("model", "layer"), [("bert", LAYER), ("gpt", "model.h.1")])
def test_tokens_are_those_of_each_text_alone(
    client: trocar.Client, model: str, layer: str, batch_size: int
) -> None:
    top = client.top_inputs(model, trocar.texts(TEXTS), layer, [3, 0], k=3, batch_size=batch_size)
    alone = [client.extract(model, trocar.texts([text]), layer) for text in TEXTS]
    for channel in (3, 0):
        peaks = np.array([maps[layer][0, :, channel].max() for maps in alone])
        assert [one.index for one in top[channel]] == np.argsort(-peaks)[:3].tolist()
        for one in top[channel]:
            maps, place = alone[one.index], one.place
            assert place is not None
            assert place.token_index is not None
            assert one.key == TEXTS[one.index]
            assert place.token_index == maps[layer][0, :, channel].argmax()
            assert place.token == maps.tokens.samples[0].tokens[place.token_index]


@pytest.mark.parametrize("name", ["layer3", "layer4"])
def test_a_crop_is_the_share_of_the_picture_that_the_model_saw_there(
    client: trocar.Client, photos: Path, name: str
) -> None:
    top = client.top_inputs("resnet18", photos, name, [31, 4, 9], k=3)
    described = client.model("resnet18").preprocessing
    assert described is not None
    for row in top:
        for one in row:
            seen = client.extract("resnet18", one.key, "/in")["/in"][0]
            seen = seen * np.array(described.std)[:, None, None] + np.array(described.mean)[:, None, None]
            assert one.place is not None
            assert one.place.cell is not None
            left, right, upper, lower = (round(edge * 224) for edge in one.place.cell.box())
            expected = seen[:2, upper:lower, left:right].mean(axis=(1, 2))
            crop = top.crop(one, widen=1.0)
            np.testing.assert_allclose(crop[..., :2].mean(axis=(0, 1)), expected, atol=0.01)
            wide = top.crop(one, widen=3.0)
            assert wide.shape[0] * wide.shape[1] > 3 * crop.shape[0] * crop.shape[1]


def test_pictures_are_drawn_of_files_arrays_and_texts(
    client: trocar.Client, photos: Path, tmp_path: Path
) -> None:
    of_files = client.top_inputs("resnet18", photos, "layer4", [31, 4], k=3)
    of_arrays = client.top_inputs("resnet18", iter(np.split(images(), 11)), "layer2", [31], k=5)
    of_texts = client.top_inputs("bert", trocar.texts(TEXTS), LAYER, [3], k=3)
    for top in (of_files, of_arrays):
        assert sum(bool(axes.images) for axes in top.plot(tmp_path / "top.png").axes) == 5 + (top is of_files)
        with Image.open(tmp_path / "top.png") as drawn:
            assert drawn.size[0] > 100
    figure = of_texts.plot()
    marked = [text.get_text() for axes in figure.axes for text in axes.texts]
    place = of_texts[3][0].place
    assert place is not None
    assert any(f"[{place.token}]" in text for text in marked)
    frames = client.top_inputs("resnet18", photos, "layer4", 31, k=2).plot(whole=True)
    assert sum(len(axes.patches) for axes in frames.axes) == 2


def test_rows_become_a_table(client: trocar.Client, photos: Path, tmp_path: Path) -> None:
    top = client.top_inputs("resnet18", photos, "layer4", [31, 4], k=2)
    frame = top.to_pandas()
    assert frame.columns.tolist() == ["channel", "rank", "value", "index", "key", "position", "token"]
    assert frame["channel"].tolist() == [31, 31, 4, 4]
    top.save(tmp_path / "top.csv")
    assert (tmp_path / "top.csv").read_text().count("\n") == 5
    assert "channel" in str(top)
    assert top._repr_html_().count("<tr>") == 5


def test_generators_and_asyncio_give_the_same(client: trocar.Client, server: RunningServer) -> None:
    x = images()

    def batches() -> Iterator[Array]:
        buffer = np.empty((4, 3, 64, 64), np.float32)
        for start in range(0, 8, 4):
            buffer[:] = x[start : start + 4]
            yield buffer

    async def run() -> trocar.TopInputs:
        async with trocar.aio.connect(server.address) as other:
            return await other.top_inputs("resnet18", x[:8], "layer2", [1, 2], k=3)

    found, expected = client.top_inputs("resnet18", batches(), "layer2", [1, 2], k=3), asyncio.run(run())
    assert [[one.index for one in row] for row in found] == [[one.index for one in row] for row in expected]
    for row in found:
        for one in row:
            np.testing.assert_array_equal(found.sources.samples[one.index], x[one.index])


@pytest.mark.parametrize(
    ("at", "options", "words"),
    [
        ("layer2", {"channels": [-1]}, "from 0 on"),
        ("layer2", {"channels": [1, 1]}, "each once"),
        ("layer2", {"channels": []}, "from 0 on"),
        ("layer2", {"by": "median"}, "must be one of max, mean"),
        ("layer2", {"k": 0}, "positive integer"),
        ("layer*", {}, "matches 4 values"),
        (trocar.tap("layer2", reduce=trocar.pool("avg")), {}, "not a tap with options"),
    ],
)
def test_what_has_no_answer_is_refused(
    client: trocar.Client, at: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        client.top_inputs("resnet18", images(2), at, **options)


def test_a_channel_that_does_not_exist_is_refused_by_the_server(client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.TrocarError, match="9999"):
        client.top_inputs("resnet18", images(2), "layer2", [9999])
