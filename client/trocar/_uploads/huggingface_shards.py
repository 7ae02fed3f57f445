"""Hugging Face shards: rows of a dataset, images and sound as their encoded bytes, texts, and labels."""

from collections.abc import Iterator, Sequence
from typing import Any

from trocar._base.token_labels import LEFT_OUT
from trocar._request.texts import Texts, sound_input, text_entry
from trocar._sources.huggingface import (
    array_value,
    element_dtype,
    input_column,
    is_image_feature,
    sound_column,
    sound_sample,
    text_column_names,
    undecoded_sound,
)
from trocar._sources.text_tables import target_columns
from trocar._uploads.object_shards import Row
from trocar.errors import SourceError


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
    sources = text_column_names(dataset, column)
    sound = "" if sources else sound_column(dataset, column)
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


def _sound_rows(dataset: Any, column: str, targets: Sequence[str]) -> Iterator[Row]:
    dataset = undecoded_sound(dataset, column)
    for index in range(len(dataset)):
        row = dataset[index]
        try:
            result = sound_sample(row[column])
            sound = sound_input(result.data, result.rate)
        except (SourceError, OSError, TypeError, ValueError) as error:
            raise SourceError(f"sample {index}: {error}") from error
        named = {name: row[name] for name in targets}
        yield sound, named[targets[0]] if len(targets) == 1 else named or None


def _text_rows(dataset: Any, sources: Sequence[str], targets: Sequence[str]) -> Iterator[Row]:
    first = dataset[0]
    longest = {name: max(map(len, dataset[name])) for name in targets if isinstance(first[name], list)}
    for index in range(len(dataset)):
        row = dataset[index]
        values = [row[name] for name in sources]
        try:
            text = Texts((text_entry(values[0] if len(values) == 1 else tuple(values)),))
        except TypeError as error:
            raise SourceError(f"sample {index}: {error}") from error
        named = {name: _padded(row[name], longest.get(name)) for name in targets}
        yield text, named[targets[0]] if len(targets) == 1 else named or None


def _padded(value: Any, longest: int | None) -> Any:
    """Return labels of tokens padded to the longest text; other targets as they are."""
    return value if longest is None else [*value, *[LEFT_OUT] * (longest - len(value))]


def _target_columns(dataset: Any, inputs: str) -> list[str]:
    names = [name for name in dataset.column_names if name != inputs]
    labels = [name for name in names if type(dataset.features[name]).__name__ == "ClassLabel"]
    result = labels if len(labels) == 1 else target_columns(names)
    if not result and len(labels) > 1:
        raise SourceError(f"name the target column, targets=...; available: {', '.join(labels)}")
    return result


def _undecoded(dataset: Any, names: Sequence[str]) -> Any:
    """Return the columns: images for the model undecoded, what is no image as arrays."""
    chosen = dataset.select_columns(list(names))
    feature = dataset.features[names[0]]
    if is_image_feature(feature):
        return chosen.cast_column(names[0], type(feature)(decode=False))
    return chosen.with_format("numpy")


def _rows(dataset: Any, inputs: str, targets: Sequence[str]) -> Iterator[Row]:
    dtype = element_dtype(dataset.features[inputs])
    for index in range(len(dataset)):
        row = dataset[index]
        try:
            value = array_value(row[inputs], dtype)
        except (SourceError, OSError) as error:
            raise SourceError(f"sample {index}: {error}") from error
        named = {name: row[name] for name in targets}
        yield value, named[targets[0]] if len(targets) == 1 else named or None
