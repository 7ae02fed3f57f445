"""Readers and batches: the same samples in any order and with any shards; chance is each sample's own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms._presets import ImageClassification

from tests.support.models.tiny_models import Plain
from tests.support.wire.shards import image_shard, png, shard_of, upload
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, ModelSpec
from trocar_server.models.families import Family
from trocar_server.models.preprocessing import Preprocessor
from trocar_server.training.datasets import (
    DatasetLibrary,
    DatasetReader,
    DatasetStore,
    check_dataset,
    sample_seed,
    to_batch,
)
from trocar_server.training.datasets import (
    reader as reader_module,
)
from trocar_server.training.losses.batch import Batch

RNG = np.random.default_rng(0)
X = RNG.standard_normal((10, 3, 8, 8)).astype(np.float32)
Y = RNG.integers(0, 5, 10)
PIXELS = [RNG.integers(0, 256, (20 + index, 30, 3), np.uint8) for index in range(6)]
PRESET = ImageClassification(crop_size=8, resize_size=12)


def hosted(transform: Any = PRESET, dtype: torch.dtype = torch.float32) -> HostedModel:
    return HostedModel(
        spec=ModelSpec("plain", "plain"),
        module=Plain(),
        family=Family.CUSTOM,
        weights="random:0",
        categories=(),
        preprocessing=None if transform is None else Preprocessor(transform),
        input_shape=(3, 8, 8),
        parameter_count=0,
        byte_count=0,
        device=torch.device("cpu"),
        dtype=dtype,
    )


@pytest.fixture
def library(tmp_path: Path) -> DatasetLibrary:
    return DatasetLibrary(DatasetStore(tmp_path / "sets", 1 << 24, 10_000), {}, 10_000)


Open = Callable[..., DatasetReader]


@pytest.fixture
def opened(library: DatasetLibrary) -> Open:
    def upload_and_open(*shards: tuple[bytes, int], **fields: Any) -> DatasetReader:
        return library.open("alice", upload(library.store, "alice", *shards, **fields))

    return upload_and_open


def cut(step: int, **arrays: Any) -> list[tuple[bytes, int]]:
    count = len(next(iter(arrays.values())))
    parts = [{name: array[i : i + step] for name, array in arrays.items()} for i in range(0, count, step)]
    return [(shard_of(**part), len(part["inputs"])) for part in parts]


def image_shards(step: int) -> list[tuple[bytes, int]]:
    encoded = [png(pixels) for pixels in PIXELS]
    return [
        (image_shard(encoded[i : i + step], targets=Y[i : min(i + step, 6)]), min(step, 6 - i))
        for i in range(0, 6, step)
    ]


def reason(call: Callable[[], object]) -> ErrorReason:
    with pytest.raises(ServiceError) as caught:
        call()
    return caught.value.reason


@pytest.mark.parametrize("step", [1, 3, 4, 10])
@pytest.mark.parametrize("order", [range(10), [9, 0, 5, 5, 2], [7], []])
def test_arrays_are_read_in_any_order_from_any_shards(opened: Open, step: int, order: Sequence[int]) -> None:
    reader = opened(*cut(step, inputs=X, targets=Y))
    arrays = reader.arrays(order)
    np.testing.assert_array_equal(arrays["inputs"], X[list(order)])
    np.testing.assert_array_equal(arrays["targets"], Y[list(order)])
    assert len(reader) == 10


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"])
def test_every_dtype_comes_back(opened: Open, dtype: str) -> None:
    values = RNG.integers(0, 2, (4, 3)).astype(dtype)
    reader = opened((shard_of(inputs=values, targets_a=values, targets_b=values[:, 0]), 4))
    batch = to_batch(reader.load([2, 1]), reader.info, hosted())
    assert torch.equal(batch.kwargs["x"], torch.from_numpy(values[[2, 1]]))
    assert list(batch.targets) == ["a", "b"]
    is_whole = dtype in ("int32", "int16", "int8", "uint8")
    assert batch.targets["b"].dtype == (torch.int64 if is_whole else getattr(torch, dtype))


def test_bfloat16_comes_back(opened: Open) -> None:
    values = torch.randn(4, 3).to(torch.bfloat16)
    reader = opened((save({"inputs": values}), 4))
    batch = to_batch(reader.load([3, 0]), reader.info, hosted())
    assert torch.equal(batch.kwargs["x"], values[[3, 0]])
    assert batch.targets == {}


def test_more_shards_than_files_may_be_open(opened: Open) -> None:
    inputs = np.arange(100, dtype=np.float32)[:, None]
    reader = opened(*cut(1, inputs=inputs))
    order = np.random.default_rng(1).permutation(100).tolist() * 2
    np.testing.assert_array_equal(reader.arrays(order)["inputs"], inputs[order])
    reader.close()


def test_there_are_only_so_many_samples(opened: Open) -> None:
    reader = opened(*cut(4, inputs=X, targets=Y))
    for index in (-1, 10):
        with pytest.raises(IndexError):
            reader.load([index])


@pytest.mark.parametrize("step", [1, 2, 6])
def test_images_are_prepared_as_the_preset_does(opened: Open, step: int) -> None:
    reader = opened(*image_shards(step))
    order = [5, 0, 3]
    batch = to_batch(reader.load(order), reader.info, hosted())
    oracle = torch.stack([PRESET(Image.fromarray(PIXELS[index])) for index in order])
    assert torch.equal(batch.kwargs["x"], oracle)
    assert batch.targets[""].tolist() == Y[order].tolist()


def test_pixels_are_prepared_for_a_model_that_takes_images_and_left_for_one_that_does_not(
    opened: Open,
) -> None:
    pixels = RNG.integers(0, 256, (3, 20, 30, 3), np.uint8)
    reader = opened((shard_of(inputs=pixels, targets=Y[:3]), 3))
    prepared = to_batch(reader.load([2, 0]), reader.info, hosted()).kwargs["x"]
    assert torch.equal(prepared, torch.stack([PRESET(Image.fromarray(pixels[i])) for i in (2, 0)]))
    plain = to_batch(reader.load([2, 0]), reader.info, hosted(None)).kwargs["x"]
    assert torch.equal(plain, torch.from_numpy(pixels[[2, 0]]))


MODEL = hosted()


def flip_and_noise(value: Tensor) -> Tensor:
    flipped: Tensor = v2.RandomHorizontalFlip(0.5)(value)
    return flipped + torch.rand(())


def augmented(reader: DatasetReader, order: Sequence[int], **options: Any) -> Batch:
    return to_batch(reader.load(order), reader.info, MODEL, flip_and_noise, **options)


def test_an_augmentation_sees_the_image_before_it_is_normalised(opened: Open) -> None:
    reader = opened(*image_shards(6))
    seen: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        seen.append(value.clone())
        return value * 0.5

    batch = to_batch(reader.load([1, 4]), reader.info, hosted(), keep)
    without = ImageClassification(crop_size=8, resize_size=12, mean=(0, 0, 0), std=(1, 1, 1))
    for position, index in enumerate((1, 4)):
        scaled = without(Image.fromarray(PIXELS[index]))
        assert torch.equal(seen[position], scaled)
        oracle = v2.functional.normalize(scaled * 0.5, PRESET.mean, PRESET.std)
        assert torch.equal(batch.kwargs["x"][position], oracle)


def test_an_augmentation_that_changes_nothing_gives_the_preset(opened: Open) -> None:
    reader = opened(*image_shards(6))
    plain = to_batch(reader.load(range(6)), reader.info, hosted())
    same = to_batch(reader.load(range(6)), reader.info, hosted(), lambda value: value)
    assert torch.equal(plain.kwargs["x"], same.kwargs["x"])


@pytest.mark.parametrize("kind", ["arrays", "images"])
def test_chance_is_each_samples_own(opened: Open, kind: str) -> None:
    def made(step: int) -> DatasetReader:
        if kind == "images":
            return opened(*image_shards(step))
        return opened(*cut(step, inputs=X[:6], targets=Y[:6]))

    whole = augmented(made(6), range(6), seed=3, epoch=1).kwargs["x"]
    reader = made(2)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    for order in ([5, 1], [0], [4, 3, 2]):
        part = augmented(reader, order, seed=3, epoch=1).kwargs["x"]
        assert torch.equal(part, whole[order])
    assert torch.equal(torch.get_rng_state(), before)
    for other in (augmented(reader, range(6), seed=3, epoch=2), augmented(reader, range(6), seed=4, epoch=1)):
        assert not torch.equal(other.kwargs["x"], whole)


def test_the_chance_of_a_sample_is_that_of_its_seed(opened: Open) -> None:
    reader = opened(*cut(10, inputs=X, targets=Y))
    batch = augmented(reader, [4, 7], seed=5, epoch=2)
    for position, index in enumerate((4, 7)):
        torch.manual_seed(sample_seed(5, 2, index))
        assert torch.equal(batch.kwargs["x"][position], flip_and_noise(torch.from_numpy(X[index])))


def test_augmented_inputs_must_stack(opened: Open) -> None:
    reader = opened(*cut(10, inputs=X, targets=Y))
    sizes = iter((2, 3))

    def shorter(value: Tensor) -> Tensor:
        return value[..., : next(sizes)]

    assert (
        reason(lambda: to_batch(reader.load([0, 1]), reader.info, hosted(), shorter))
        is ErrorReason.INPUT_REJECTED
    )


def test_batches_are_loaded_ahead_in_order(opened: Open) -> None:
    reader = opened(*cut(3, inputs=X, targets=Y))
    batches = [[0, 1], [9], [4, 5, 6]]
    assert [list(loaded.indices) for loaded in reader.load_ahead(batches)] == batches
    ahead = reader.load_ahead(iter(batches), depth=5)
    next(ahead)
    ahead.close()  # type: ignore[attr-defined]  # a generator is what it is


def test_what_fails_ahead_is_raised_where_it_was_due(opened: Open) -> None:
    reader = opened(*cut(3, inputs=X, targets=Y))
    ahead = reader.load_ahead([[0], [99], [1]])
    assert next(ahead).indices == (0,)
    with pytest.raises(IndexError):
        next(ahead)


def test_a_batch_is_not_larger_than_memory_allows(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, images = opened(*cut(10, inputs=X, targets=Y)), opened(*image_shards(6))
    monkeypatch.setattr(reader_module, "MAX_LOADED_BYTES", 4000)
    assert len(arrays.samples([0, 1])) == 2
    for reader in (arrays, images):
        assert reason(lambda reader=reader: reader.load(range(6))) is ErrorReason.FIT_INVALID  # type: ignore[misc]


def test_images_make_no_arrays(opened: Open) -> None:
    assert reason(lambda: opened(*image_shards(6)).arrays([0])) is ErrorReason.DATASET_INVALID


def test_an_image_whose_pixels_are_damaged_is_named(opened: Open) -> None:
    whole = png(PIXELS[0])
    damaged = whole[: len(whole) // 2] + whole[-12:]
    reader = opened((image_shard([whole, damaged], targets=Y[:2]), 2))
    with pytest.raises(ServiceError, match="sample 1") as caught:
        reader.load([0, 1])
    assert caught.value.reason is ErrorReason.DATASET_INVALID


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: hosted(None), ErrorReason.NO_PREPROCESSING),
        (lambda: hosted(dtype=torch.float16), ErrorReason.INPUT_REJECTED),
    ],
)
def test_what_a_model_cannot_take_is_refused_before_anything_starts(
    opened: Open, model: Callable[[], HostedModel], expected: ErrorReason
) -> None:
    is_images = expected is ErrorReason.NO_PREPROCESSING
    reader = opened(*(image_shards(6) if is_images else cut(10, inputs=X, targets=Y)))
    check_dataset(reader.info, hosted())
    assert reason(lambda: check_dataset(reader.info, model())) is expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_advice_for_another_dtype_can_be_followed(opened: Open, dtype: torch.dtype) -> None:
    reader = opened(*cut(10, inputs=X))
    with pytest.raises(ServiceError) as failure:
        check_dataset(reader.info, hosted(dtype=dtype))
    line = failure.value.message.split("`")[1]
    assert ("ml_dtypes." in line) is (dtype is torch.bfloat16)  # NumPy itself has none
    converted = eval(line, {"array": X, "ml_dtypes": ml_dtypes, "np": np})
    assert converted.dtype.name == str(dtype).removeprefix("torch.")
