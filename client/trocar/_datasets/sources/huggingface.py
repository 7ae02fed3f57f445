"""Datasets of Hugging Face's `datasets` library: saved to disk, local files, or a name on the hub."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trocar._datasets.sample import Sample, Source
from trocar._datasets.sources.files import printable, read_file
from trocar.errors import SourceError

PREFIX = "hf:"
USUAL_COLUMNS = ("image", "img", "pixel_values")
"""Where a dataset without an image column may have what the model wants."""


def is_huggingface(dataset: object) -> bool:
    """Tell whether an object is such a dataset, without the library."""
    return (
        hasattr(dataset, "column_names") and hasattr(dataset, "features") and hasattr(dataset, "__getitem__")
    )


def open_huggingface(text: str) -> Source:
    """Return the source that `hf:name-or-path[:split][:column]` stands for.

    Raises:
        SourceError: The library is missing, there is no such dataset, or split or column is not clear.
    """
    dataset, column = find_huggingface(text)
    return huggingface_source(dataset, column, name=printable(text))


def find_huggingface(text: str) -> tuple[Any, str]:
    """Return the dataset that `hf:name-or-path[:split][:column]` stands for, and the column or "".

    Raises:
        SourceError: The library is missing, there is no such dataset, or the split is not clear.
    """
    name, split, column = [*text.removeprefix(PREFIX).split(":"), "", ""][:3]
    dataset = _load(name, split)
    if isinstance(dataset, Mapping):
        if len(dataset) != 1 and split not in dataset:
            raise SourceError(f"{text}: say which split, {PREFIX}{name}:SPLIT; there is {', '.join(dataset)}")
        dataset = dataset[split or next(iter(dataset))]
    return dataset, column


def huggingface_source(dataset: Any, column: str = "", *, name: str = "") -> Source:
    """Return the source of one column; images come as their encoded bytes, undecoded.

    Args:
        dataset: A `datasets.Dataset`.
        column: Which; the only image column, or the one with a usual name, when empty.
        name: What messages and the manifest call it.

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
    try:
        import datasets
    except ImportError as error:
        raise SourceError(f'{PREFIX} needs a library: pip install "trocar[huggingface]"') from error
    path = Path(name)
    is_saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    try:
        return datasets.load_from_disk(name) if is_saved else datasets.load_dataset(name, split=split or None)
    except Exception as error:  # the library raises what it likes: OSError, ValueError, its own
        raise SourceError(f"{PREFIX}{name}: {type(error).__name__}: {error}") from error


def input_column(dataset: Any, column: str, name: str) -> str:
    """Return the column that goes into the model; see `huggingface_source`.

    Raises:
        SourceError: It is not there, or not clear.
    """
    names: list[str] = list(dataset.column_names)
    if column:
        if column not in names:
            raise SourceError(f"{name} has no column {column!r}; there is {', '.join(names)}")
        return column
    images = [column for column in names if is_image_feature(dataset.features[column])]
    found = images or [column for column in names if column in USUAL_COLUMNS]
    if len(found) != 1 and len(names) != 1:
        raise SourceError(f"{name}: say which column, {PREFIX}name:split:COLUMN; there is {', '.join(names)}")
    return found[0] if found else names[0]


def is_image_feature(feature: object) -> bool:
    """Tell whether a column holds images."""
    return type(feature).__name__ == "Image"


def _samples(dataset: Any, column: str, start: int) -> Iterator[Sample]:
    count = len(dataset)
    for index in range(start, count):
        value = dataset[index][column]
        yield Sample(str(index), partial(encoded_value, value), (index + 1) / count)


def encoded_value(value: Any) -> object:
    """Return an image's encoded bytes, from the dataset or from the file that it names; or the array."""
    if value is None:
        raise SourceError("the row is empty")
    if not isinstance(value, Mapping):
        return np.asarray(value)
    data = value.get("bytes")
    if data is not None:
        return data
    if not value.get("path"):
        raise SourceError("the row has no image")
    return read_file(Path(value["path"]))
