"""Shards as Parquet files: a column `key`, and one for each feature map; needs `pyarrow`.

A feature map is Arrow's fixed-shape tensor, so that pyarrow gives arrays of the right shape; readers
that do not know it (pandas, Polars, DuckDB) see lists of numbers in C order. One whose rows differ in size
is a struct of `data`, such a list, and `shape`, as the storage of Arrow's variable-shape tensor.
Format: https://arrow.apache.org/docs/format/CanonicalExtensions.html#fixed-shape-tensor
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trocar._base.replacement import replacement
from trocar._base.tensors import Array
from trocar._export.ragged import RaggedRows
from trocar._export.schema import Column, Schema
from trocar._export.writers.shard_writer import PIECE_BYTES, ShardContent, ShardFormat
from trocar._extras import need
from trocar.errors import OutputError

_GROUP_BYTES = 8 * PIECE_BYTES
"""About how many bytes of values one row group has, which is what a reader takes into memory at once."""
_KEY = "key"


def _write(path: Path, shard: ShardContent) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [(_KEY, pa.string()), *((column.name, _type(column)) for column in shard.schema.columns)],
        metadata={name: value for name, value in shard.metadata.items() if name != "trocar.images"},
    )
    row_bytes = max(1, sum(_bytes(column, shard) for column in shard.schema.columns))
    step = max(1, _GROUP_BYTES // row_bytes)
    with (
        replacement(path, is_durable=True) as partial,
        pq.ParquetWriter(partial, schema, compression="zstd") as writer,
    ):
        for start in range(0, len(shard.keys), step):
            stop = min(start + step, len(shard.keys))
            columns = [pa.array(shard.keys[start:stop], pa.string())]
            columns += [
                _values(column, shard.arrays[column.name][start:stop]) for column in shard.schema.columns
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=step)


def _bytes(column: Column, shard: ShardContent) -> int:
    """Return the bytes of a row; the mean of those that differ."""
    rows = shard.arrays[column.name]
    return rows.values.nbytes // max(1, len(rows)) if isinstance(rows, RaggedRows) else column.row_bytes


def _type(column: Column) -> Any:
    """Return the Arrow type of one row.

    Raises:
        OutputError: There is none.
    """
    import pyarrow as pa

    if 0 in column.row_shape:
        raise OutputError(f"'{column.name}' has rows of shape {column.row_shape}, which Parquet cannot store")
    try:
        kind = pa.from_numpy_dtype(column.dtype)
        if column.is_ragged:
            shape = pa.list_(pa.int64(), len(column.row_shape))
            return pa.struct([("data", pa.large_list(kind)), ("shape", shape)])
        return pa.fixed_shape_tensor(kind, column.row_shape)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise OutputError(f"'{column.name}' is {column.dtype}, which Parquet cannot store") from error


def _values(column: Column, rows: Array) -> Any:
    import pyarrow as pa

    kind = _type(column)
    if column.is_ragged:
        return _structs(kind, list(rows), len(column.row_shape))
    flat = pa.array(np.ascontiguousarray(rows).reshape(-1), kind.value_type)
    size = int(np.prod(column.row_shape, dtype=np.int64))
    return pa.ExtensionArray.from_storage(kind, pa.FixedSizeListArray.from_arrays(flat, size))


def _structs(kind: Any, rows: Sequence[Array], rank: int) -> Any:
    import pyarrow as pa

    ends = np.cumsum([0, *(row.size for row in rows)], dtype=np.int64)
    flat = np.concatenate([row.reshape(-1) for row in rows])
    data = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(flat, kind.field("data").type.value_type))
    sizes = pa.array([size for row in rows for size in row.shape], pa.int64())
    shapes = pa.FixedSizeListArray.from_arrays(sizes, rank)
    return pa.StructArray.from_arrays([data, shapes], fields=[kind.field("data"), kind.field("shape")])


def _read(path: Path, schema: Schema) -> tuple[Mapping[str, Any], Sequence[str]]:
    import pyarrow.parquet as pq

    keys: list[str] = pq.read_table(path, columns=[_KEY])[_KEY].to_pylist()
    facts = pq.read_metadata(path)
    rows = max(1, facts.row_group(0).num_rows) if facts.num_row_groups else 1
    return {column.name: _ParquetColumn(path, column, len(keys), rows) for column in schema.columns}, keys


class _ParquetColumn:
    """The rows of one column; each slice reads the row groups that it touches.

    Attributes:
        block_rows: The rows of a group.
    """

    def __init__(self, path: Path, column: Column, count: int, block_rows: int) -> None:
        self._path = path
        self._column = column
        self.block_rows = block_rows
        self.shape = (count, len(column.row_shape)) if column.is_ragged else (count, *column.row_shape)

    def __getitem__(self, rows: slice) -> Array:
        import pyarrow.parquet as pq

        start, stop, _ = rows.indices(self.shape[0])
        parts: list[Array] = [self._none()]
        with pq.ParquetFile(self._path) as file:
            first = 0
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                low, high = max(start, first), min(stop, first + count)
                if low < high:
                    parts.append(self._group(file, group)[low - first : high - first])
                first += count
        return np.concatenate(parts)

    def _none(self) -> Array:
        if self._column.is_ragged:
            return np.empty(0, object)
        return np.empty((0, *self._column.row_shape), self._column.dtype)

    def _group(self, file: Any, group: int) -> Array:
        name = self._column.name
        wanted = file.read_row_group(group, columns=[name])[name].combine_chunks()
        if self._column.is_ragged:
            return self._ragged(wanted)[:]
        flat: Array = wanted.storage.flatten().to_numpy(zero_copy_only=False)
        return flat.reshape(len(wanted), *self._column.row_shape).astype(self._column.dtype, copy=False)

    def _ragged(self, wanted: Any) -> RaggedRows:
        flat = wanted.field("data").flatten().to_numpy(zero_copy_only=False)
        shapes = wanted.field("shape").flatten().to_numpy().reshape(len(wanted), -1)
        return RaggedRows(flat.astype(self._column.dtype, copy=False), shapes)


def _need() -> None:
    need("the format parquet", "datasets", "pyarrow.parquet")


def _check(schema: Schema) -> None:
    for column in schema.columns:
        if column.name == _KEY:
            raise OutputError(
                f"a feature map cannot be called {_KEY!r} in Parquet; give its tap another alias"
            )
        _type(column)


PARQUET = ShardFormat("parquet", ".parquet", _write, _read, _check, _need)
