"""Datasets of Hugging Face's `datasets` library: saved to disk, local files, or a name on the hub."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trocar._base.names import few, shortened
from trocar._extras import HUGGINGFACE, need_for_source
from trocar._sources.files import printable, read_file
from trocar._sources.sample import MAX_SAMPLE_BYTES, Sample, Source
from trocar.errors import SourceError

PREFIX = HUGGINGFACE
USUAL_COLUMNS = ("image", "img", "pixel_values")
"""Where a dataset without an image column may have what the model wants."""


def is_huggingface(dataset: object) -> bool:
    """Whether an object is such a dataset, without importing the library."""
    return (
        hasattr(dataset, "column_names") and hasattr(dataset, "features") and hasattr(dataset, "__getitem__")
    )


def open_huggingface(text: str) -> Source:
    """Return the source of `hf:name-or-path[:split][:column]`.

    Raises:
        SourceError: The library is missing, there is no such dataset, or split or column is not clear.
    """
    dataset, column = find_huggingface(text)
    return huggingface_source(dataset, column, name=printable(text))


def find_huggingface(text: str) -> tuple[Any, str]:
    """Return the dataset of `hf:name-or-path[:split][:column]`, and the column or "".

    Raises:
        SourceError: The library is missing, there is no such dataset, or the split is not clear.
    """
    name, split, column = [*text.removeprefix(PREFIX).split(":"), "", ""][:3]
    dataset = _load(name, split)
    if isinstance(dataset, Mapping):
        if len(dataset) != 1 and split not in dataset:
            raise SourceError(
                f"{text}: name the split, {PREFIX}{name}:SPLIT; available: {few(list(dataset))}"
            )
        dataset = dataset[split or next(iter(dataset))]
    return dataset, column


def read_parquet(path: Path) -> Any:
    """Return the dataset of a Parquet file.

    Raises:
        SourceError: The library is missing, or it is no such file.
    """
    need_for_source(PREFIX)
    import datasets

    try:
        return datasets.Dataset.from_parquet(str(path))
    except Exception as error:  # as above
        raise SourceError(f"{path}: {type(error).__name__}: {error}") from error


def huggingface_source(dataset: Any, column: str = "", *, name: str = "") -> Source:
    """Return the source of one column; images come as their encoded bytes, undecoded.

    Args:
        dataset: A `datasets.Dataset`.
        column: Which; the only image column, or the one with a usual name, when empty.
        name: Its name in messages and the manifest.

    Raises:
        SourceError: The column is not there, or not clear.
    """
    column = input_column(dataset, column, name or "the dataset")
    fingerprint = str(getattr(dataset, "_fingerprint", ""))
    dataset = dataset.select_columns([column])
    if is_image_feature(dataset.features[column]):
        dataset = dataset.cast_column(column, type(dataset.features[column])(decode=False))
    else:
        dataset = dataset.with_format("numpy")
    description = {
        "kind": "huggingface",
        "name": name,
        "column": column,
        "count": len(dataset),
        "fingerprint": fingerprint,
    }
    return Source(description, partial(_samples, dataset, column), len(dataset))


def _load(name: str, split: str) -> Any:
    need_for_source(PREFIX)
    import datasets

    path = Path(name)
    is_saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    try:
        return datasets.load_from_disk(name) if is_saved else datasets.load_dataset(name, split=split or None)
    except Exception as error:  # the library raises OSError, ValueError and its own
        raise SourceError(f"{PREFIX}{name}: {type(error).__name__}: {error}") from error


def input_column(dataset: Any, column: str, name: str) -> str:
    """Return the column that goes into the model; see `huggingface_source`.

    Raises:
        SourceError: It is not there, or not clear.
    """
    names: list[str] = list(dataset.column_names)
    if column:
        if column not in names:
            raise SourceError(f"{name} has no column {column!r}; available: {few(names)}")
        return column
    images = [column for column in names if is_image_feature(dataset.features[column])]
    found = images or [column for column in names if column in USUAL_COLUMNS]
    if len(found) != 1 and len(names) != 1:
        raise SourceError(f"{name}: name the column, {PREFIX}name:split:COLUMN; available: {few(names)}")
    return found[0] if found else names[0]


def is_image_feature(feature: object) -> bool:
    """Whether a column holds images."""
    return type(feature).__name__ == "Image"


def _samples(dataset: Any, column: str, start: int) -> Iterator[Sample]:
    count = len(dataset)
    for index in range(start, count):
        try:
            load: Callable[[], object] = partial(encoded_value, dataset[index][column])
        except Exception as error:  # noqa: BLE001 - the library raises anything for a damaged file
            load = partial(_raise, SourceError(f"{type(error).__name__}: {shortened(error, 300)}"))
        yield Sample(str(index), load, (index + 1) / count)


def encoded_value(value: Any) -> object:
    """Return an image's encoded bytes, from the dataset or from the file that it names; or the array."""
    if value is None:
        raise SourceError("the row is empty")
    if not isinstance(value, Mapping):
        return np.asarray(value)
    data = value.get("bytes")
    if data is not None:
        if len(data) > MAX_SAMPLE_BYTES:
            raise SourceError(
                f"the row has more than {MAX_SAMPLE_BYTES >> 20} MiB; it is too large for a sample"
            )
        return data
    if not value.get("path"):
        raise SourceError("the row has no image")
    return read_file(Path(value["path"]))


def _raise(error: SourceError) -> object:
    raise error
