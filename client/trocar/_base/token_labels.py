"""Token labels: lists of labels of different lengths, for the tokens, words or spans of each text."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from trocar._base.tensors import Array, as_numpy, is_array

LEFT_OUT = -100
"""The label that losses leave out, as in torch."""


OUTSIDE = "O"
"""The name of class 0 of named spans: that of words in no span."""


def padded_labels(values: object) -> Array | None:
    """Return lists of labels, or of spans, as one array that is filled up with -100; None for others.

    Lists of integers become (samples, longest), lists of (start, stop, label) become (samples, most, 3).

    Raises:
        TypeError: The class of a span is a name.
    """
    if not _is_list(values):
        return None
    if _are_spans(values):
        return _padded_spans(values)
    rows = [row for row in map(_row, values) if row is not None]
    if len(rows) < len(values):
        return None
    result = np.full((len(rows), max(map(len, rows))), LEFT_OUT, np.int64)
    for place, row in zip(result, rows, strict=True):
        place[: len(row)] = row
    return result


def label_names(values: object) -> tuple[str, ...]:
    """Return the names of classes in lists of labels or spans, in the order of their classes.

    Alphabetical; "O", the class of words in no span, is first. Empty where the classes are numbers.
    """
    if not _is_list(values):
        return ()
    if _are_spans(values):
        result = {label for spans in values for _, _, label in spans if isinstance(label, str)}
        return (OUTSIDE, *sorted(result - {OUTSIDE})) if result else ()
    if not all(_is_list(row) and all(isinstance(label, str) for label in row) for row in values):
        return ()
    result = {label for row in values for label in row}
    return (*([OUTSIDE] if OUTSIDE in result else []), *sorted(result - {OUTSIDE}))


def numbered(values: Any, names: Sequence[str]) -> Any:
    """Return lists of labels or spans with the number of each class in place of its name.

    Raises:
        TypeError: Only some classes are names.
    """
    numbers: Mapping[Any, int] = {name: number for number, name in enumerate(names)}
    try:
        if _are_spans(values):
            return [[(start, stop, numbers[label]) for start, stop, label in spans] for spans in values]
        return [[numbers[label] for label in row] for row in values]
    except KeyError as error:
        raise TypeError(f"classes are names or numbers, not both: {names[-1]!r} and {error}") from None


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple)) and bool(value)


def _are_spans(values: Sequence[Any]) -> bool:
    """Whether each text has a list of (start, stop, label), which may be empty."""
    rows = [row for row in values if isinstance(row, (list, tuple))]
    return len(rows) == len(values) and any(rows) and all(_is_span(span) for row in rows for span in row)


def _is_span(value: object) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        return False
    return all(isinstance(place, (int, np.integer)) for place in value[:2])


def _padded_spans(values: Sequence[Any]) -> Array:
    name = next((label for spans in values for _, _, label in spans if isinstance(label, str)), None)
    if name is not None:
        raise TypeError(
            f"the class of a span is {name!r}; give its number, or upload the texts as a data set"
        )
    padded_spans = np.full((len(values), max(1, *map(len, values)), 3), LEFT_OUT, np.int64)
    for place, spans in zip(padded_spans, values, strict=True):
        if spans:
            place[: len(spans)] = np.asarray(spans)
    return padded_spans


def _row(value: Any) -> Array | None:
    if not is_array(value) and not isinstance(value, (list, tuple)):
        return None
    row = as_numpy(value) if is_array(value) else np.asarray(value)
    return row if row.ndim == 1 and row.dtype.kind in "iu" else None
