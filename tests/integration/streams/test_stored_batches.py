"""Analyses of data sets on the server: the numbers of the same samples sent by the caller."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.models import text_models
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.wire.pictures import encoded, photo
from trocar._request.stored.stored_samples import StoredSamples
from trocar_server.config import ModelConfig

TEXTS = ["the cat sat", "a dog sat on the mat and left", "hello", "one two three", "cats"]
LAYER = "model.encoder.layer.1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    tokenizer = text_models.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    factory = "tests.support.models.text_models:bert"
    models: dict[str, Any] = {
        "resnet18": ModelConfig(weights="random:0"),
        "other": ModelConfig(architecture="resnet18", weights="random:1"),
        "bert": {"factory": factory, "input_shape": (4,), "processor": tokenizer},
    }
    with running_server(models=models, data_dir=tmp_path_factory.mktemp("data")) as running:
        yield running


def images(count: int = 7) -> Array:
    return noise(count, 3, 64, 64, seed=5)


@pytest.fixture(scope="module")
def arrays(server: RunningServer) -> trocar.StoredDataset:
    with trocar.connect(server.address) as client:
        return client.upload_dataset((images(), np.arange(7) % 2), name="arrays", shard_bytes=200_000)


def ranked(top: trocar.TopInputs) -> list[list[tuple[int, float, object]]]:
    return [[(one.index, one.value, one.place) for one in row] for row in top]


@pytest.mark.parametrize("batch_size", [3, 7])
def test_arrays_give_what_the_callers_own_give(
    client: trocar.Client, arrays: trocar.StoredDataset, batch_size: int
) -> None:
    options: dict[str, Any] = {"k": 3, "batch_size": batch_size}
    stored = client.top_inputs("resnet18", arrays, "layer3", [31, 2], **options)
    assert ranked(stored) == ranked(client.top_inputs("resnet18", images(), "layer3", [31, 2], **options))
    near = client.nearest("resnet18", arrays, "fc", images()[:2], **options)
    own = client.nearest("resnet18", images(), "fc", images()[:2], **options)
    np.testing.assert_array_equal(near.indices, own.indices)
    np.testing.assert_array_equal(near.distances, own.distances)
    assert near.keys[0][0] == "sample 0"


def test_images_pixels_and_texts_give_what_the_callers_own_give(client: trocar.Client) -> None:
    files = [encoded(photo(90, 70 + 10 * number, seed=number), "PNG") for number in range(4)]
    pixels = np.random.default_rng(0).integers(0, 255, (4, 80, 90, 3), np.uint8)
    for model, samples, at in (
        ("resnet18", files, "layer4"),
        ("resnet18", list(pixels), "layer4"),
        ("bert", TEXTS, LAYER),
    ):
        stored = client.upload_dataset((samples, [0] * len(samples)))
        given: Any = trocar.texts(TEXTS) if model == "bert" else samples
        found = client.top_inputs(model, stored, at, [3, 0], k=2, batch_size=2)
        assert ranked(found) == ranked(client.top_inputs(model, given, at, [3, 0], k=2, batch_size=2))


def test_every_analysis_takes_them(client: trocar.Client, arrays: trocar.StoredDataset) -> None:
    x = images()
    for run in (
        lambda data: client.cka("resnet18", data, ["layer1", "layer4"]).matrix,
        lambda data: client.rsa("resnet18", data, ["layer1"], other="other").matrix,
        lambda data: np.float64(client.fid("resnet18", data, data, "layer1").distance),
        lambda data: client.fit_pca("resnet18", data, "layer1", 2).components,
    ):
        np.testing.assert_array_equal(run(arrays), run(x))


def test_no_samples_travel(client: trocar.Client, arrays: trocar.StoredDataset) -> None:
    from trocar._wire.stream_messages import batch_call

    call = batch_call(0, StoredSamples(arrays.dataset_id, 0, 7))
    assert not call.payloads
    assert len(call.head) < 100


def test_pictures_of_samples_on_the_server_have_their_names(
    client: trocar.Client, arrays: trocar.StoredDataset, tmp_path: Path
) -> None:
    top = client.top_inputs("resnet18", arrays, "layer3", [31], k=2)
    figure = top.plot(tmp_path / "top.png")
    shown = {text.get_text() for axes in figure.axes for text in axes.texts}
    assert {one.key for one in top[31]} <= shown
    with pytest.raises(ValueError, match="on the server alone"):
        top.crop(top[31][0])


@pytest.mark.parametrize(
    ("samples", "error", "words"),
    [
        (("", 5, 3), trocar.errors.InvalidArgumentError, "samples 5 to 7 .* which has 7"),
        (("", -1, 3), trocar.errors.InvalidArgumentError, "samples -1 to 1"),
        (("", 0, 0), trocar.errors.InputError, "empty"),
        (("", 0, 100_000), trocar.errors.TrocarError, "the limit is"),
        (("nowhere", 0, 1), trocar.errors.UnknownDatasetError, "nowhere"),
    ],
)
def test_a_bad_batch_fails_alone(
    client: trocar.Client, arrays: trocar.StoredDataset, samples: Any, error: Any, words: str
) -> None:
    dataset_id, first, count = samples
    bad: Any = StoredSamples(dataset_id or arrays.dataset_id, first, count)
    good: Any = StoredSamples(arrays.dataset_id, 0, 2)
    with client.extract_stream("resnet18", [good, bad, good], ["fc"]) as stream:
        results = list(stream)
    with pytest.raises(error, match=words):
        results[1].unwrap()
    np.testing.assert_array_equal(results[0].unwrap()["fc"], results[2].unwrap()["fc"])


def test_an_upload_that_has_not_ended_is_refused(client: trocar.Client, arrays: trocar.StoredDataset) -> None:
    from dataclasses import replace

    with pytest.raises(ValueError, match="finish its upload"):
        client.cka("resnet18", replace(arrays, is_complete=False), ["layer1"])
