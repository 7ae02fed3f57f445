"""Hugging Face shards: rows of a dataset, images and sound as their encoded bytes, texts, and labels."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from trocar._base.token_labels import LEFT_OUT
from trocar._request.texts import Audio, audio, texts
from trocar._sources.huggingface import encoded_value, input_column, is_image_feature
from trocar._sources.text_tables import USUAL_TARGETS, target_columns, text_columns
from trocar._uploads.object_shards import Row
from trocar.errors import SourceError
from trocar_api.v1 import extraction_pb2 as pb


def huggingface_rows(
    dataset: Any, column: str, targets: Sequence[str] | None
) -> tuple[Iterator[Row], tuple[str, ...]]:
    """Return the samples of a dataset, and the names of its classes.

    Args:
        dataset: A `datasets.Dataset`.
        column: The column of model inputs, or two of pairs with a comma between; found automatically when
            empty.
        targets: Columns of targets; several go by their names. The one that holds class labels, or has a
            usual name, when None.

    Raises:
        SourceError: A column is not there, or not clear.
    """
    sources = _text_columns(dataset, column)
    sound = "" if sources else _sound_column(dataset, column)
    chosen = sources[0] if sources else sound or input_column(dataset, column, "the dataset")
    names = _target_columns(dataset, chosen) if targets is None else list(targets)
    missing = [name for name in names if name not in dataset.column_names]
    if missing:
        raise SourceError(
            f"the dataset has no column {missing[0]!r}; available: {', '.join(dataset.column_names)}"
        )
    categories: tuple[str, ...] = ()
    if len(names) == 1:
        feature = dataset.features[names[0]]
        categories = tuple(getattr(getattr(feature, "feature", feature), "names", None) or ())
    if sources:
        return _text_rows(dataset.select_columns([*sources, *names]), sources, names), categories
    if sound:
        return _sound_rows(dataset.select_columns([sound, *names]), sound, names), categories
    return _rows(_undecoded(dataset, [chosen, *names]), chosen, names), categories


def _text_columns(dataset: Any, column: str) -> tuple[str, ...]:
    """Return the column of texts or token ids, or two of pairs; empty where the inputs are something else."""
    names: list[str] = list(dataset.column_names)
    if any(is_image_feature(dataset.features[name]) for name in names):
        return ()
    if not column:
        return text_columns([name for name in names if name not in USUAL_TARGETS])
    given = tuple(column.split(","))
    if not set(given) <= set(names):
        return ()  # which the message of `input_column` names
    are_texts = all(getattr(dataset.features[name], "dtype", "") == "string" for name in given)
    return given if len(given) <= 2 and are_texts else ()


def _sound_column(dataset: Any, column: str) -> str:
    """Return the column of sound; empty where the inputs are something else, or it is not clear."""
    names = [column] if column in dataset.column_names else list(dataset.column_names)
    if any(is_image_feature(dataset.features[name]) for name in names):
        return ""
    found = [name for name in names if _is_sound_feature(dataset.features[name])]
    return found[0] if len(found) == 1 else ""


def _is_sound_feature(feature: Any) -> bool:
    """Whether a column holds sound: encoded, or its samples with their rate."""
    return type(feature).__name__ == "Audio" or (
        isinstance(feature, Mapping) and {"array", "sampling_rate"} <= set(feature)
    )


def _sound_rows(dataset: Any, column: str, targets: Sequence[str]) -> Iterator[Row]:
    feature = dataset.features[column]
    if not isinstance(feature, Mapping):  # decoding would need torchcodec, and the server decodes
        dataset = dataset.cast_column(column, type(feature)(decode=False))
    for index in range(len(dataset)):
        row = dataset[index]
        try:
            sound = _sound(row[column])
        except (SourceError, OSError, TypeError, ValueError) as error:
            raise SourceError(f"sample {index}: {error}") from error
        named = {name: row[name] for name in targets}
        yield sound, named[targets[0]] if len(targets) == 1 else named or None


def _sound(value: Any) -> Audio:
    if isinstance(value, Mapping) and value.get("array") is not None:
        return audio(np.asarray(value["array"], np.float32), int(value["sampling_rate"]))
    data = bytes(cast("bytes", encoded_value(value)))
    if not (data[:4] == b"fLaC" or (data[:4] == b"RIFF" and data[8:12] == b"WAVE")):
        raise SourceError("it is neither WAV nor FLAC; convert it, for example with ffmpeg")
    return Audio(((pb.AudioClip(encoded_byte_count=len(data)), memoryview(data)),))


def _text_rows(dataset: Any, sources: Sequence[str], targets: Sequence[str]) -> Iterator[Row]:
    first = dataset[0]
    longest = {name: max(map(len, dataset[name])) for name in targets if isinstance(first[name], list)}
    for index in range(len(dataset)):
        row = dataset[index]
        values = [row[name] for name in sources]
        try:
            text = texts([values[0] if len(values) == 1 else tuple(values)])
        except TypeError as error:
            raise SourceError(f"sample {index}: {error}") from error
        named = {name: _padded(row[name], longest.get(name)) for name in targets}
        yield text, named[targets[0]] if len(targets) == 1 else named or None


def _padded(value: Any, longest: int | None) -> Any:
    """Return labels of tokens filled up to those of the longest text; other targets as they are."""
    return value if longest is None else [*value, *[LEFT_OUT] * (longest - len(value))]


def _target_columns(dataset: Any, inputs: str) -> list[str]:
    names = [name for name in dataset.column_names if name != inputs]
    labels = [name for name in names if type(dataset.features[name]).__name__ == "ClassLabel"]
    found = labels if len(labels) == 1 else target_columns(names)
    if not found and len(labels) > 1:
        raise SourceError(f"name the target column, targets=...; available: {', '.join(labels)}")
    return found


def _undecoded(dataset: Any, names: Sequence[str]) -> Any:
    """Return the columns: images for the model undecoded, what is no image as arrays."""
    chosen = dataset.select_columns(list(names))
    feature = dataset.features[names[0]]
    if is_image_feature(feature):
        return chosen.cast_column(names[0], type(feature)(decode=False))
    return chosen.with_format("numpy")


def _rows(dataset: Any, inputs: str, targets: Sequence[str]) -> Iterator[Row]:
    for index in range(len(dataset)):
        row = dataset[index]
        try:
            value = encoded_value(row[inputs])
        except (SourceError, OSError) as error:
            raise SourceError(f"sample {index}: {error}") from error
        named = {name: row[name] for name in targets}
        yield value, named[targets[0]] if len(targets) == 1 else named or None
