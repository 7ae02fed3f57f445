"""Datasets of Hugging Face's `datasets` library: saved to disk, local files, or a name on the hub."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from trocar._base.names import few, shortened
from trocar._extras import HUGGINGFACE, need_for_source
from trocar._sources.files import printable, read_file
from trocar._sources.sample import MAX_SAMPLE_BYTES, Sample, SoundSample, Source, TextSample
from trocar._sources.text_tables import USUAL_TARGETS, text_columns
from trocar.errors import SourceError

PREFIX = HUGGINGFACE
USUAL_COLUMNS = ("image", "img", "pixel_values")
"""Where a dataset without an image column may have what the model wants."""
_COLON = re.compile(r":(?![^\[\]]*\])")
"""Between parts of a name; none of `train[:100]`."""
_WIDENED = ("uint8", "int8", "int16", "int32", "float16")
"""Dtypes that can be sent, and that the library's NumPy format does not keep."""


def is_huggingface(dataset: object) -> bool:
    """Whether an object is such a dataset, without importing the library."""
    return (
        hasattr(dataset, "column_names") and hasattr(dataset, "features") and hasattr(dataset, "__getitem__")
    )


def open_huggingface(text: str, column: str = "") -> Source:
    """Return the source of `hf:name-or-path[:split][:column]`.

    Raises:
        SourceError: The library is missing, there is no such dataset, or split or column is not clear.
    """
    dataset, own = find_huggingface(text)
    return huggingface_source(dataset, own or column, name=printable(text))


def find_huggingface(text: str) -> tuple[Any, str]:
    """Return the dataset of `hf:name-or-path[:split][:column]`, and the column or "".

    Raises:
        SourceError: The library is missing, there is no such dataset, or the split is not clear.
    """
    name, split, column = [*_COLON.split(text.removeprefix(PREFIX)), "", ""][:3]
    dataset = _load(name, split)
    if isinstance(dataset, Mapping):
        if split not in dataset and (split or len(dataset) != 1):
            raise SourceError(
                f"{text}: name the split, {PREFIX}{name}:SPLIT; available: {few(list(dataset))}"
            )
        dataset = dataset[split or next(iter(dataset))]
    elif split and "[" not in split and str(dataset.split) != split:
        own = "no splits" if dataset.split is None else f"the split {str(dataset.split)!r} only"
        raise SourceError(f"{text}: {PREFIX}{name} has {own}")
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
    """Return the source of one column; images and sound come as their encoded bytes, undecoded.

    Args:
        dataset: A `datasets.Dataset`.
        column: Which, or two of pairs of texts with a comma between; the only image column, the texts or
            sound, or the one with a usual name, when empty.
        name: Its name in messages and the manifest.

    Raises:
        SourceError: The column is not there, or not clear.
    """
    fingerprint = str(getattr(dataset, "_fingerprint", ""))
    texts = text_column_names(dataset, column)
    sound = "" if texts else sound_column(dataset, column)
    columns = texts or (sound or input_column(dataset, column, name or "the dataset"),)
    dataset = dataset.select_columns(list(columns))
    take: Callable[[Mapping[str, Any]], object]
    if sound:
        dataset, take = undecoded_sound(dataset, sound), partial(_sound_of, sound)
    elif is_image_feature(dataset.features[columns[0]]):
        feature = dataset.features[columns[0]]
        dataset = dataset.cast_column(columns[0], type(feature)(decode=False))
        take = partial(_value_of, columns[0])
    elif texts:
        take = partial(_text_of, columns)
    else:
        take = partial(_array_of, columns[0], element_dtype(dataset.features[columns[0]]))
        dataset = dataset.with_format("numpy")
    description = {
        "kind": "huggingface",
        "name": name,
        "column": ",".join(columns),
        "count": len(dataset),
        "fingerprint": fingerprint,
    }
    return Source(description, partial(_samples, dataset, take), len(dataset))


def _load(name: str, split: str) -> Any:
    need_for_source(PREFIX)
    import datasets

    path = Path(name)
    is_saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)  # a line for each attempt
    try:
        return datasets.load_from_disk(name) if is_saved else datasets.load_dataset(name, split=split or None)
    except Exception as error:  # the library raises OSError, ValueError and its own
        raise SourceError(f"{PREFIX}{name}: {_problem(error)}") from error
    finally:
        hub.setLevel(level)


def _problem(error: Exception) -> str:
    """Return why a data set could not be opened."""
    kind = type(error).__name__
    if kind == "DatasetNotFoundError":
        return "no folder here and no data set of the Hugging Face hub has this name"
    if isinstance(error, ConnectionError):
        return (
            "no folder here has this name, and the Hugging Face hub cannot be reached; give the folder that "
            "`save_to_disk` wrote"
        )
    return f"{kind}: {error}"


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
    result = images or [column for column in names if column in USUAL_COLUMNS]
    if len(result) != 1 and len(names) != 1:
        raise SourceError(f"{name}: name the column, {PREFIX}name:split:COLUMN; available: {few(names)}")
    return result[0] if result else names[0]


def is_image_feature(feature: object) -> bool:
    """Whether a column holds images."""
    return type(feature).__name__ == "Image"


def text_column_names(dataset: Any, column: str) -> tuple[str, ...]:
    """Return the column of texts or token ids, or two of pairs; empty where the inputs are something else."""
    names: list[str] = list(dataset.column_names)
    if any(is_image_feature(dataset.features[name]) for name in names):
        return ()
    if not column:
        return text_columns([name for name in names if name not in USUAL_TARGETS])
    given = tuple(column.split(","))
    if not set(given) <= set(names):
        return ()  # which the message of `input_column` names
    features = [dataset.features[name] for name in given]
    are_texts = all(getattr(getattr(one, "feature", one), "dtype", "") == "string" for one in features)
    return given if len(given) <= 2 and (are_texts or text_columns(given) == given) else ()


def sound_column(dataset: Any, column: str) -> str:
    """Return the column of sound; empty where the inputs are something else, or it is not clear."""
    names: list[str] = list(dataset.column_names)
    if column:
        names = [column] if column in names else []
    if any(is_image_feature(dataset.features[name]) for name in names):
        return ""
    result = [name for name in names if _is_sound_feature(dataset.features[name])]
    return result[0] if len(result) == 1 else ""


def undecoded_sound(dataset: Any, column: str) -> Any:
    """Return a dataset whose sound comes as it is stored; decoding would need torchcodec."""
    feature = dataset.features[column]
    if isinstance(feature, Mapping):
        return dataset
    return dataset.cast_column(column, type(feature)(decode=False))


def sound_sample(value: Any) -> SoundSample:
    """Return the sound of a row: its samples, or its file.

    Raises:
        SourceError: The row is empty, or its file is neither WAV nor FLAC.
        OSError: Its file cannot be read.
    """
    if isinstance(value, Mapping) and value.get("array") is not None:
        return SoundSample(np.asarray(value["array"], np.float32), int(value["sampling_rate"]))
    data = bytes(cast("bytes", encoded_value(value)))
    if not (data[:4] == b"fLaC" or (data[:4] == b"RIFF" and data[8:12] == b"WAVE")):
        raise SourceError("it is neither WAV nor FLAC; convert it, for example with ffmpeg")
    return SoundSample(data)


def _is_sound_feature(feature: Any) -> bool:
    """Whether a column holds sound: encoded, or its samples with their rate."""
    return type(feature).__name__ == "Audio" or (
        isinstance(feature, Mapping) and {"array", "sampling_rate"} <= set(feature)
    )


def _text_of(columns: Sequence[str], row: Mapping[str, Any]) -> TextSample:
    values = [row[name] for name in columns]
    if any(value is None for value in values):
        raise SourceError("the row is empty")
    return TextSample(values[0] if len(values) == 1 else tuple(values))


def _sound_of(column: str, row: Mapping[str, Any]) -> SoundSample:
    return sound_sample(row[column])


def _value_of(column: str, row: Mapping[str, Any]) -> object:
    return encoded_value(row[column])


def _array_of(column: str, dtype: np.dtype[Any] | None, row: Mapping[str, Any]) -> object:
    return array_value(row[column], dtype)


def _samples(dataset: Any, take: Callable[[Mapping[str, Any]], object], start: int) -> Iterator[Sample]:
    count = len(dataset)
    for index in range(start, count):
        try:
            load: Callable[[], object] = partial(take, dataset[index])
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


def element_dtype(feature: Any) -> np.dtype[Any] | None:
    """Return the dtype of the numbers in a column where `array_value` has to restore it.

    None for float64: Python's floats are stored as such, so that it tells nothing about what the model takes,
    and the library's float32 is what most models take.
    """
    while hasattr(feature, "feature"):  # of a list
        feature = feature.feature
    name = getattr(feature, "dtype", None)
    return np.dtype(name) if name in _WIDENED else None


def array_value(value: Any, dtype: np.dtype[Any] | None) -> object:
    """Return a value of the library's NumPy format in the dtype of its column.

    That format makes int64 of all integers, and pixels are an image only as uint8. Rows with nulls are floats
    and stay so, as do ragged lists.

    Raises:
        SourceError: The row is empty.
    """
    result = encoded_value(value)
    if dtype is None or not isinstance(result, np.ndarray):
        return result
    is_same_kind = result.dtype.kind in ("f" if dtype.kind == "f" else "iu")
    return result.astype(dtype, copy=False) if is_same_kind else result


def _raise(error: SourceError) -> object:
    raise error
