"""Output schema: dtype and shape of rows, set by the first batch, the same for all others."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from trocar._base.names import few, shortened
from trocar._base.tensors import WIRE_DTYPES, Array
from trocar._export.ragged import ANY, SHAPES
from trocar.errors import OutputError

if TYPE_CHECKING:
    from trocar._result.feature_maps import FeatureMaps

_DTYPES = frozenset(WIRE_DTYPES) - {"bfloat16"}
"""What a feature map can have in memory."""
_MOST_DIMENSIONS = 32
_PLAIN = "@[](),=+ "
"""Characters of a feature map's name that file names may have, beside letters, digits and `_.-~`."""


@dataclass(frozen=True)
class Column:
    """One feature map over all samples."""

    name: str
    dtype: np.dtype[Any]
    """In memory: float32 where the server computed bfloat16."""
    row_shape: tuple[int, ...]
    """The shape of one sample's values; -1 for a size that differs from sample to sample."""
    stem: str
    """Its name in file names and Zarr paths."""
    info: Mapping[str, Any]
    """Module path, type, call, port, pick and the server's dtype."""

    @property
    def is_ragged(self) -> bool:
        """Whether rows differ in size."""
        return ANY in self.row_shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample's values, where these do not differ."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Schema:
    """The columns of an output, in the order of the reply."""

    model_id: str
    columns: tuple[Column, ...]
    expansions: Mapping[str, list[str]]
    """What each selector became."""

    def to_json(self) -> dict[str, Any]:
        """Serialise it for the manifest."""
        columns = [
            {**asdict(column), "dtype": column.dtype.name, "row_shape": list(column.row_shape)}
            for column in self.columns
        ]
        return {"model_id": self.model_id, "expansions": self.expansions, "columns": columns}

    @classmethod
    def from_json(cls, result: Mapping[str, Any]) -> "Schema":
        """Load a schema written by `to_json`.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: It was not written by `to_json`.
        """
        columns = tuple(_column(entry) for entry in result["columns"])
        if not isinstance(result["model_id"], str) or not isinstance(result["expansions"], Mapping):
            raise TypeError("a schema has a model_id and expansions")
        return cls(result["model_id"], columns, result["expansions"])

    def mismatch(self, arrays: Mapping[str, Array]) -> str | None:
        """Return the reason why rows do not fit; None if they do."""
        names = {column.name for column in self.columns}
        if names != arrays.keys():
            odd = few(sorted(names ^ arrays.keys()))
            return f"not every batch gave {odd}; which modules run depends on the data; use --batch 1"
        for column in self.columns:
            rows = arrays[column.name]
            if not _fits(rows.shape[1:], column.row_shape) or rows.dtype != column.dtype:
                return (
                    f"'{column.name}' has rows of shape {rows.shape[1:]}, {rows.dtype}; earlier ones have "
                    f"{column.row_shape}, {column.dtype}. These cannot be joined in one array: use "
                    "samples of one size"
                )
        return None


def _fits(shape: tuple[int, ...], row_shape: tuple[int, ...]) -> bool:
    return len(shape) == len(row_shape) and all(
        wanted in (ANY, size) for size, wanted in zip(shape, row_shape, strict=True)
    )


def schema_of(maps: "FeatureMaps", ragged: Mapping[str, Sequence[int]] = MappingProxyType({})) -> Schema:
    """Return the schema of a first batch.

    Args:
        maps: Its feature maps.
        ragged: Dimensions of a row that differ from row to row, by feature map.

    Raises:
        OutputError: There are no values to write, two arrays would have one name, or values are cast to int8.
    """
    if not maps:
        raise OutputError("no tap asks for values, so nothing would be written; see `trocar stats`")
    columns: list[Column] = []
    for name, rows in maps.items():
        cast = maps.info[name].cast
        if cast is not None and cast.scales:
            raise OutputError(
                f"'{name}': the scale of int8 is another one in each batch; cast to float16 instead"
            )
        # Positions of tokens are those of one batch.
        info = {**asdict(maps.info[name]), "token_positions": (), "token_texts": {}}
        del info["shape"]
        shape = tuple(ANY if axis in ragged.get(name, ()) else n for axis, n in enumerate(rows.shape[1:]))
        if ANY in shape and name + SHAPES in maps:
            raise OutputError(f"a feature map cannot be called {name + SHAPES!r}; give its tap another alias")
        stem = _stem(name, {column.stem.lower() for column in columns})
        columns.append(Column(name, rows.dtype, shape, stem, info))
    expansions = {selector: list(names) for selector, names in maps.expansions.items()}
    return Schema(maps.model_id, tuple(columns), expansions)


def check_rows(arrays: Mapping[str, Array], count: int) -> None:
    """Check that every array has one row for each sample.

    Raises:
        OutputError: One has not.
    """
    for name, values in arrays.items():
        if values.ndim == 0 or values.shape[0] != count:
            raise OutputError(
                f"'{name}' has shape {values.shape}; its first dimension is not the batch of {count}, so it "
                "cannot be written by row. Remove it from --tap, or use --out FILE.safetensors with one batch"
            )


def _column(result: Mapping[str, Any]) -> Column:
    """Check a column that was read: stems name files, and shapes say how many bytes of one are a row."""
    name, dtype, shape, stem, info = (result[key] for key in ("name", "dtype", "row_shape", "stem", "info"))
    if not isinstance(name, str) or not isinstance(info, Mapping) or dtype not in _DTYPES:
        raise ValueError(f"column {shortened(name)} of {shortened(dtype)}")
    if not isinstance(stem, str) or not stem or "/" in stem or "\\" in stem or stem in (".", ".."):
        raise ValueError(f"the file of column {shortened(name)}")
    if len(shape) > _MOST_DIMENSIONS or any(
        type(size) is not int or not ANY <= size < 1 << 40 for size in shape
    ):
        raise ValueError(f"the shape of column {shortened(name)}")
    return Column(name, np.dtype(dtype), tuple(shape), stem, info)


def _stem(name: str, taken: set[str]) -> str:
    """Return a file name that is valid on every file system and unique among columns, ignoring case."""
    quoted = quote(name, safe=_PLAIN)
    if quoted.startswith((".", "__", " ")) or quoted.endswith((".", " ")) or not quoted:
        quoted = f"~{quoted}~"  # relative or hidden for file systems, reserved in Zarr
    if len(quoted) > 100:
        quoted = f"{quoted[:90]}-{len(taken)}"
    while quoted.lower() in taken:
        quoted += "~"
    return quoted
