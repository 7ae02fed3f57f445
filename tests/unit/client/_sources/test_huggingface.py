"""Datasets of the `datasets` library, all made here: nothing is downloaded."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.wire.pictures import encoded, photo
from trocar._base.input_kinds import is_image
from trocar._sources.huggingface import huggingface_source, open_huggingface
from trocar._sources.sample import TextSample
from trocar._uploads.huggingface_shards import huggingface_rows
from trocar.errors import SourceError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def pictures() -> list[bytes]:
    return [encoded(photo(8, 8, seed), "PNG") for seed in range(4)]


@pytest.fixture
def dataset(pictures: list[bytes]) -> Any:
    rows = {"image": [{"bytes": data, "path": None} for data in pictures], "label": [0, 1, 2, 3]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict(rows, features=features)


def loaded(source: Any, start: int = 0) -> list[Any]:
    return [sample.load() for sample in source.samples(start)]


def test_images_come_as_the_bytes_that_were_stored(dataset: Any, pictures: list[bytes]) -> None:
    source = huggingface_source(dataset)
    assert (source.count, source.description["column"]) == (4, "image")
    assert loaded(source) == pictures
    assert loaded(source, 2) == pictures[2:]
    assert [sample.key for sample in source.samples(3)] == ["3"]


def test_images_that_are_files_are_read(tmp_path: Path, pictures: list[bytes]) -> None:
    for index, data in enumerate(pictures):
        (tmp_path / f"{index}.png").write_bytes(data)
    paths = {"photo": [str(tmp_path / f"{index}.png") for index in range(4)]}
    files = datasets.Dataset.from_dict(paths).cast_column("photo", datasets.Image())
    assert loaded(huggingface_source(files)) == pictures


def test_numbers_come_as_arrays() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    dataset = datasets.Dataset.from_dict({"pixel_values": rows.tolist(), "label": [0, 1]})
    for found, row in zip(loaded(huggingface_source(dataset)), rows, strict=True):
        np.testing.assert_array_equal(found, row)
        assert found.dtype == np.float32


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "int64", "float16", "float32", "bool"])
def test_arrays_have_the_dtype_of_their_column(dtype: str) -> None:
    rows = (np.arange(2 * 4 * 4 * 3).reshape(2, 4, 4, 3) % 120).astype(dtype)
    features = datasets.Features({"x": datasets.Array3D((4, 4, 3), dtype)})
    nested = datasets.Features({"x": datasets.Sequence(datasets.Sequence(datasets.Value(dtype)))})
    for dataset, expected in (
        (datasets.Dataset.from_dict({"x": list(rows)}, features=features), rows),
        (datasets.Dataset.from_dict({"x": rows[..., 0].tolist()}, features=nested), rows[..., 0]),
    ):
        uploaded: list[Any] = [value for value, _ in huggingface_rows(dataset, "", None)[0]]
        for values in (loaded(huggingface_source(dataset)), uploaded):
            np.testing.assert_array_equal(values, expected)
            assert {value.dtype for value in values} == {expected.dtype}


def test_pixels_in_arrays_are_images() -> None:
    features = datasets.Features(
        {"pixels": datasets.Array3D((8, 8, 3), "uint8"), "label": datasets.Value("float64")}
    )
    labels = [0.1, 0.2]
    rows = {"pixels": [np.asarray(photo(8, 8, seed)) for seed in range(2)], "label": labels}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    assert all(is_image(value) for value in loaded(huggingface_source(dataset, "pixels")))
    found, _ = huggingface_rows(dataset, "pixels", ["label"])
    for (pixels, label), expected in zip(found, labels, strict=True):
        assert is_image(pixels)
        assert label == expected


def test_numbers_with_gaps_stay_floats() -> None:
    features = datasets.Features({"x": datasets.Sequence(datasets.Value("int32"))})
    dataset = datasets.Dataset.from_dict({"x": [[1, None, 3]]}, features=features)
    np.testing.assert_array_equal(loaded(huggingface_source(dataset)), [[1, np.nan, 3]])


def test_saved_dataset_and_its_splits_are_opened(dataset: Any, pictures: list[bytes], tmp_path: Path) -> None:
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([2])}).save_to_disk(tmp_path / "two")
    assert loaded(open_huggingface(f"hf:{tmp_path}/one")) == pictures
    assert loaded(open_huggingface(f"hf:{tmp_path}/two:test:image")) == pictures[2:3]
    with pytest.raises(SourceError, match=r"name the split.*available: train, test"):
        open_huggingface(f"hf:{tmp_path}/two")


def test_a_split_that_is_not_there_is_refused(dataset: Any, tmp_path: Path) -> None:
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "single")
    with pytest.raises(SourceError, match=r"single:test.*available: train"):
        open_huggingface(f"hf:{tmp_path}/single:test")
    with pytest.raises(SourceError, match=r"name the split.*available: train"):
        open_huggingface(f"hf:{tmp_path}/single:train[:1]:label")
    with pytest.raises(SourceError, match="has no splits"):
        open_huggingface(f"hf:{tmp_path}/one:test")


def test_a_column_that_is_not_there_is_refused_where_there_is_sound() -> None:
    sound = [{"array": [0.0, 1.0], "sampling_rate": 8000}] * 2
    dataset = datasets.Dataset.from_dict({"audio": sound, "sentence": ["a", "b"]})
    with pytest.raises(SourceError, match="no column 'sentense'"):
        huggingface_source(dataset, "sentense")


def test_token_ids_are_texts_with_and_without_their_name() -> None:
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]]})
    first, second = (loaded(huggingface_source(dataset, column)) for column in ("", "input_ids"))
    assert first == second == [TextSample([1, 2]), TextSample([3])]


def test_folder_of_images_is_opened(pictures: list[bytes], tmp_path: Path) -> None:
    for index, data in enumerate(pictures):
        (tmp_path / "photos" / "train").mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / "train" / f"{index}.png").write_bytes(data)
    found = loaded(open_huggingface(f"hf:{tmp_path}/photos:train"))
    np.testing.assert_array_equal(
        [np.asarray(Image.open(io.BytesIO(data))) for data in found], [photo(8, 8, seed) for seed in range(4)]
    )


def test_fingerprint_is_that_of_the_saved_dataset(dataset: Any, tmp_path: Path) -> None:
    dataset.save_to_disk(tmp_path / "one")
    dataset.select([0, 1]).save_to_disk(tmp_path / "other")
    seen = [
        open_huggingface(f"hf:{tmp_path}/{name}").description["fingerprint"]
        for name in ("one", "one", "other")
    ]
    assert seen[0] == seen[1] != seen[2]


def test_column_has_to_be_clear(dataset: Any) -> None:
    two = datasets.concatenate_datasets(
        [dataset, dataset.rename_columns({"image": "other", "label": "id"})], axis=1
    )
    with pytest.raises(SourceError, match=r"name the column.*image, label, other, id"):
        huggingface_source(two)
    with pytest.raises(SourceError, match="no column 'pixels'; available: image, label"):
        huggingface_source(dataset, "pixels")
    assert huggingface_source(two, "other").count == 4


def test_row_without_an_image_fails_alone(pictures: list[bytes]) -> None:
    rows = {"image": [{"bytes": pictures[0], "path": None}, None]}
    dataset = datasets.Dataset.from_dict(rows, features=datasets.Features({"image": datasets.Image()}))
    good, bad = huggingface_source(dataset).samples(0)
    assert good.load() == pictures[0]
    with pytest.raises(SourceError, match="the row is empty"):
        bad.load()


def test_dataset_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"hf:.*nothing"):
        open_huggingface(f"hf:{tmp_path}/nothing")
