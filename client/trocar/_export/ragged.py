"""Ragged rows: rows of one feature map that differ in size, such as one per token, without padding.

The values of all rows follow one another, and an array (rows, dimensions) has the shape of each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from trocar._base.tensors import Array
from trocar._request.inputs import with_flags
from trocar._request.texts import Audio, texts
from trocar.errors import TrocarError

if TYPE_CHECKING:
    from trocar._export.decoding import Loaded
    from trocar._request.taps import Tap
    from trocar._result.feature_maps import FeatureMaps
    from trocar._sync.client import Client

ANY = -1
"""Stands in a row's shape for a size that differs from row to row."""
SHAPES = "#shapes"
"""How the name of the array of shapes ends, behind that of the feature map."""
_LENGTHS = (2, 3)
"""Two lengths of a batch: dimensions that differ between them are those of tokens."""


@dataclass(frozen=True)
class RaggedRows:
    """Rows of one feature map, each of a shape of its own.

    Attributes:
        values: The values of all rows, of one dimension, in C order.
        shapes: int64 (rows, dimensions of a row).
    """

    values: Array
    shapes: Array

    @classmethod
    def of(cls, rows: Sequence[Array]) -> "RaggedRows":
        """Join rows of one rank; at least one."""
        values = np.concatenate([np.ascontiguousarray(row).reshape(-1) for row in rows])
        return cls(values, np.array([row.shape for row in rows], np.int64).reshape(len(rows), rows[0].ndim))

    @classmethod
    def joined(cls, parts: "Sequence[RaggedRows]") -> "RaggedRows":
        """Return the rows of several batches as one."""
        return cls(
            np.concatenate([part.values for part in parts]), np.concatenate([part.shapes for part in parts])
        )

    @cached_property
    def ends(self) -> Array:
        """Where each row ends in the values."""
        result: Array = np.cumsum(np.prod(self.shapes, axis=1, dtype=np.int64), dtype=np.int64)
        return result

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows, and the rank of each."""
        return self.shapes.shape

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, rows: slice) -> Array:
        """Return rows as a NumPy array of objects, each an array of its own."""
        start, stop, _ = rows.indices(len(self))
        result = np.empty(max(0, stop - start), object)
        if not result.size:
            return result
        ends = [int(self.ends[start - 1]) if start else 0, *map(int, self.ends[start:stop])]
        values = self.values[ends[0] : ends[-1]]  # one read, where they are on disk
        for place in range(len(result)):
            row = np.array(values[ends[place] - ends[0] : ends[place + 1] - ends[0]])
            result[place] = row.reshape(self.shapes[start + place])
        return result

    def stored(self, row_shape: Sequence[int]) -> Array:
        """Return the values as they are stored: (tokens of all rows, ...) where only that size differs."""
        if row_shape[0] == ANY and ANY not in row_shape[1:]:
            return self.values.reshape(int(self.shapes[:, 0].sum()), *row_shape[1:])
        return self.values


def is_consistent(rows: RaggedRows, row_shape: Sequence[int]) -> bool:
    """Whether rows that were read have the sizes that they should have, and all of their values."""
    shapes = rows.shapes
    if shapes.ndim != 2 or shapes.dtype.kind != "i" or shapes.shape[1] != len(row_shape):
        return False
    if shapes.size and int(shapes.min()) < 0:
        return False
    fixed = [axis for axis, size in enumerate(row_shape) if size != ANY]
    are_same = all((shapes[:, axis] == row_shape[axis]).all() for axis in fixed)
    return are_same and rows.values.shape == (int(rows.ends[-1]) if len(rows) else 0,)


def rows_without_padding(maps: "FeatureMaps", name: str, axes: Sequence[int]) -> RaggedRows:
    """Return the rows of a feature map, each without the padding of its batch.

    Args:
        maps: The feature maps of a batch.
        name: Which.
        axes: Dimensions of a row, from 0, whose size differs from row to row.
    """
    values, counts = maps[name], _chosen_counts(maps, name)
    if counts:
        return RaggedRows.of([value[:count] for value, count in zip(values, counts, strict=True)])
    if not any(entry.padded_length for entry in maps.processed):
        return RaggedRows.of(list(values))  # of sound: the clips of a batch have one length
    length, mask = maps.tokens.padded_length, maps.tokens.mask
    return RaggedRows.of([_kept(value, axes, kept, length) for value, kept in zip(values, mask, strict=True)])


def ragged_axes(
    client: "Client",
    model_id: str,
    taps: "Sequence[str | Tap]",
    maps: "FeatureMaps",
    flags: Mapping[str, bool | int | str],
) -> dict[str, tuple[int, ...]]:
    """Return the dimensions of a row, from 0, that differ from row to row, by feature map.

    Found by dry runs on two lengths. Where the model takes none of these, as with images beside the texts,
    dimensions of the batch's padded length are taken for those of tokens.

    Args:
        client: The client.
        model_id: The model.
        taps: The taps of the run.
        maps: The first batch's feature maps.
        flags: Flags of the forward, by name.
    """
    if not maps.processed:
        return {}
    counted = {name: (0,) for name in maps if _chosen_counts(maps, name)}
    try:
        short, long = (
            client.plan(model_id, with_flags(inputs, flags), taps).feature_maps
            for inputs in _two_lengths(client, model_id, maps)
        )
        result = {name: _differing(short[name].shape, long[name].shape) for name in maps}
    except (TrocarError, KeyError):
        result = {name: _padded(maps, name) for name in maps}
    return {name: axes for name, axes in {**result, **counted}.items() if axes}


def kinds_of(client: "Client", model_id: str) -> "Callable[[Loaded], object]":
    """Return the batching key of a sample; samples with equal keys may share a batch.

    Clips of any lengths may if the model takes windows of one length, which is asked with the first clip.
    """
    takes_windows: list[bool] = []

    def kind(sample: "Loaded") -> object:
        if not isinstance(sample.value, Audio):
            return sample.kind
        if not takes_windows:
            shape = _first_shape(client, model_id)
            takes_windows.append(bool(shape) and not any(isinstance(size, str) for size in shape[1:]))
        return "sound" if takes_windows[0] else sample.kind

    return kind


def _two_lengths(client: "Client", model_id: str, maps: "FeatureMaps") -> list[Any]:
    """Return two inputs for dry runs, which differ only in their length."""
    if any(entry.padded_length for entry in maps.processed):
        token = maps.tokens.samples[0].ids[0]
        return [texts([[token] * length]) for length in _LENGTHS]
    example, named = client.model(model_id).input_shape, _first_shape(client, model_id)
    sizes = named[1:] if len(named) == len(example) + 1 else ("length",) * len(example)
    return [
        (
            1,
            *(
                size if isinstance(size, int) else length * own
                for size, own in zip(sizes, example, strict=True)
            ),
        )
        for length in _LENGTHS
    ]


def _first_shape(client: "Client", model_id: str) -> tuple[int | str, ...]:
    inputs = client.model(model_id).inputs
    return inputs[0].shape if inputs else ()


def _differing(short: tuple[int, ...], long: tuple[int, ...]) -> tuple[int, ...]:
    pairs = zip(short[1:], long[1:], strict=True)
    return tuple(axis for axis, (first, second) in enumerate(pairs) if first != second)


def _padded(maps: "FeatureMaps", name: str) -> tuple[int, ...]:
    lengths, axes = {entry.padded_length for entry in maps.processed} - {0}, maps.info[name].axes
    if axes and "?" not in axes:
        named = enumerate(zip(axes[1:], maps[name].shape[1:], strict=True))
        return tuple(dim for dim, (one, size) in named if one.endswith("tokens") and size in lengths)
    return tuple(axis for axis, size in enumerate(maps[name].shape[1:]) if size in lengths)


def _chosen_counts(maps: "FeatureMaps", name: str) -> list[int]:
    """Return how many tokens of each sample were chosen by spans or roles; empty where none were."""
    positions = maps.info[name].token_positions
    counts = [len(own) for own in positions]
    return counts if counts and maps[name].shape[:2] == (len(counts), max(counts)) else []


def _kept(value: Array, axes: Sequence[int], kept: Array, length: int) -> Array:
    for axis in axes:
        if value.shape[axis] == length:
            value = np.compress(kept, value, axis)
    return value
