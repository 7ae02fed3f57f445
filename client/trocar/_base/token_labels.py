"""Token labels: lists of labels of different lengths, one for each token of a text."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trocar._base.tensors import Array, as_numpy, is_array

LEFT_OUT = -100
"""The label that losses leave out, as in torch."""


def padded_labels(values: object) -> Array | None:
    """Return lists of integers as one array (samples, longest), filled up with -100; None for others."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)) or not values:
        return None
    rows = [row for row in map(_row, values) if row is not None]
    if len(rows) < len(values):
        return None
    found = np.full((len(rows), max(map(len, rows))), LEFT_OUT, np.int64)
    for place, row in zip(found, rows, strict=True):
        place[: len(row)] = row
    return found


def _row(value: Any) -> Array | None:
    if not is_array(value) and not isinstance(value, (list, tuple)):
        return None
    row = as_numpy(value) if is_array(value) else np.asarray(value)
    return row if row.ndim == 1 and row.dtype.kind in "iu" else None
