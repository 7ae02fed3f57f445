"""Rows of Hugging Face's datasets: images as their encoded bytes, undecoded, and the columns to learn."""

from collections.abc import Iterator, Sequence
from typing import Any

from trocar._datasets.sources.huggingface import encoded_value, input_column, is_image_feature
from trocar._uploads.objects import Row
from trocar.errors import SourceError

_USUAL_TARGETS = ("label", "labels", "target", "fine_label")


def huggingface_rows(
    dataset: Any, column: str, targets: Sequence[str] | None
) -> tuple[Iterator[Row], tuple[str, ...]]:
    """Return the samples of a dataset, and the names of its classes.

    Args:
        dataset: A `datasets.Dataset`.
        column: Which column goes into the model; found by itself when empty.
        targets: Which are to be learnt; several go by their names. The one that holds class labels, or has a
            usual name, when None.

    Raises:
        SourceError: A column is not there, or not clear.
    """
    chosen = input_column(dataset, column, "the dataset")
    names = _target_columns(dataset, chosen) if targets is None else list(targets)
    missing = [name for name in names if name not in dataset.column_names]
    if missing:
        raise SourceError(
            f"the dataset has no column {missing[0]!r}; there is {', '.join(dataset.column_names)}"
        )
    categories: tuple[str, ...] = ()
    if len(names) == 1:
        categories = tuple(getattr(dataset.features[names[0]], "names", None) or ())
    return _rows(_undecoded(dataset, [chosen, *names]), chosen, names), categories


def _target_columns(dataset: Any, inputs: str) -> list[str]:
    names = [name for name in dataset.column_names if name != inputs]
    labels = [name for name in names if type(dataset.features[name]).__name__ == "ClassLabel"]
    usual = [name for name in _USUAL_TARGETS if name in names]
    found = labels if len(labels) == 1 else usual[:1]
    if not found and len(labels) > 1:
        raise SourceError(f"say which column is to be learnt, targets=...; there is {', '.join(labels)}")
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
