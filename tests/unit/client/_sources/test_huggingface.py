"""Datasets of the `datasets` library, all made here: nothing is downloaded."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.wire.pictures import encoded, photo
from trocar._sources.huggingface import huggingface_source, open_huggingface
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


def test_saved_dataset_and_its_splits_are_opened(dataset: Any, pictures: list[bytes], tmp_path: Path) -> None:
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([2])}).save_to_disk(tmp_path / "two")
    assert loaded(open_huggingface(f"hf:{tmp_path}/one")) == pictures
    assert loaded(open_huggingface(f"hf:{tmp_path}/two:test:image")) == pictures[2:3]
    with pytest.raises(SourceError, match=r"name the split.*available: train, test"):
        open_huggingface(f"hf:{tmp_path}/two")


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
