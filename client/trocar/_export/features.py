"""Features: an output read back as arrays over all shards, on disk until a row is read."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trocar._base.delegation import explained
from trocar._base.names import shortened, unknown_name
from trocar._base.tables import first_lines, html_table
from trocar._base.tensors import Array
from trocar._export import manifest
from trocar._export.open_shard import Failure
from trocar._export.ragged import RaggedRows, is_consistent
from trocar._export.schema import Column, Schema
from trocar._export.writers.formats import FORMATS
from trocar._export.writers.shard_writer import ShardFormat
from trocar.errors import OutputError

if TYPE_CHECKING:
    from trocar._analysis.neighbours.metrics import Metric
    from trocar._analysis.neighbours.neighbours import Neighbours
    from trocar._request.taps import Tap
    from trocar._sync.client import Client

_BLOCK_ROWS = 64
"""Rows that an iteration reads at once, where a format has no blocks of its own."""


@explained
def read_features(path: str | os.PathLike[str]) -> "Features":
    """Open an output of `extract_dataset` or `trocar extract --out FOLDER`, complete or not.

        features = trocar.read_features("features/")
        features["layer4"].shape             # (50000, 512, 7, 7)
        features["layer4"][1000:1010]        # numpy array (10, 512, 7, 7); only these rows are read
        features.sample_keys[1000]           # 'n01443537/img_17.jpg'

    Args:
        path: The folder. Of a run that is not done, the complete shards are there.

    Raises:
        OutputError: It is no such folder, or the library of its format is missing.
    """
    root = Path(path)
    result = manifest.load(root)
    if result is None:
        raise OutputError(f"{root} has no {manifest.NAME}; it is not an output of `trocar extract`")
    return Features(root, result)


class FeatureColumn:
    """One feature map over all shards, with the most common operations of a NumPy array.

    `column[5]`, `column[10:20]`, `column[[3, 1, 2]]` and `column[mask]` return NumPy arrays and read
    only those rows; `np.asarray(column)` reads them all. A safetensors or .npy shard is mapped into
    memory, never copied as a whole.

    Attributes:
        shape: The number of rows, and the shape of one.
        dtype: The NumPy dtype.
        parts: One array-like for each shard.
    """

    def __init__(self, column: Column, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)
        self._ends = np.cumsum([part.shape[0] for part in parts], dtype=np.int64)
        self._row_shape = column.row_shape
        self.dtype = column.dtype
        self.shape: tuple[int, ...] = (int(self._ends[-1]) if parts else 0, *column.row_shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: int | slice | Sequence[int] | Array) -> Array:
        """Return rows as a NumPy array of your own.

        Raises:
            IndexError: There is no such row, or the key is no valid index.
        """
        if isinstance(rows, (int, np.integer)):
            index = int(rows)
            if not -len(self) <= index < len(self):
                raise IndexError(f"row {index} of {len(self)}")
            index %= len(self)
            row: Array = self._between(index, index + 1)[0]
            return row
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._between(start, stop)
            return self[np.arange(start, stop, step)]
        wanted = np.asarray(rows)
        if wanted.dtype == bool:
            if wanted.shape != (len(self),):
                raise IndexError(f"a mask of shape {wanted.shape} for {len(self)} rows")
            wanted = np.flatnonzero(wanted)
        if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
            raise IndexError("rows are chosen by an integer, a slice, or a list of integers or booleans")
        out = self._empty(len(wanted))
        for position, index in enumerate(wanted):
            out[position] = self[int(index)]
        return out

    def __iter__(self) -> Iterator[Array]:
        for block in self.blocks(_BLOCK_ROWS):
            yield from block

    def blocks(self, rows: int) -> Iterator[Array]:
        """Yield all rows in order, about so many at once; a row group of Parquet is read whole."""
        first = 0
        for part, end in zip(self.parts, map(int, self._ends), strict=True):
            step = max(rows, getattr(part, "block_rows", 1))
            for start in range(first, end, step):
                yield self._between(start, min(start + step, end))
            first = end

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return all rows, so that `np.asarray(column)` works."""
        if copy is False:
            raise ValueError("the rows are in several shards; only a copy can join them")
        return self._between(0, len(self)).astype(dtype or self.dtype, copy=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, {len(self.parts)} shards)"

    def _empty(self, count: int) -> Array:
        return np.empty((count, *self._row_shape), self.dtype)

    def _between(self, start: int, stop: int) -> Array:
        out = self._empty(max(0, stop - start))
        first = 0
        for part, end in zip(self.parts, self._ends, strict=True):
            low, high = max(start, first), min(stop, int(end))
            if low < high:
                out[low - start : high - start] = part[low - first : high - first]
            first = int(end)
        return out


class RaggedColumn(FeatureColumn):
    """One feature map over all shards whose rows differ in size, as one of tokens: without padding.

    `column[5]` returns the array of one row, `column[10:20]` and the like a NumPy array of objects, each the
    array of a row. In `shape`, -1 stands for a size that differs.
    """

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return all rows as an array of objects."""
        if copy is False or dtype not in (None, object):
            raise ValueError("the rows differ in size; `list(column)` has them one by one")
        return self._between(0, len(self))

    def _empty(self, count: int) -> Array:
        return np.empty(count, object)


class Features(Mapping[str, FeatureColumn]):
    """The feature maps of a data set by name; made by `read_features`.

    Attributes:
        sample_keys: The key of every row: relative path, key in the archive, or index.
        failed: Samples that have no row, with the reason.
        is_done: Whether the run is complete.
        job: Description of the output: model, taps, source, batch, format.
        expansions: The names of the feature maps that each selector matched.
    """

    def __init__(self, root: Path, outcome: manifest.Manifest) -> None:
        self.root = root
        self.job = outcome.job
        self.is_done = outcome.is_done
        self.failed: tuple[Failure, ...] = outcome.failed
        self.expansions: Mapping[str, Sequence[str]] = outcome.schema.expansions if outcome.schema else {}
        self.sample_keys: list[str] = []
        self._columns: dict[str, FeatureColumn] = {}
        if outcome.schema is None:
            return
        format = _format(root, outcome.job)
        parts: dict[str, list[Any]] = {column.name: [] for column in outcome.schema.columns}
        for shard in outcome.shards:
            if not shard.name:
                continue
            if not (root / shard.name).exists():
                raise OutputError(f"{root / shard.name} is gone; run `trocar extract` again with --restart")
            arrays, keys = _read(root / shard.name, format, outcome.schema, shard.row_count)
            self.sample_keys += keys
            for name, array in arrays.items():
                parts[name].append(array)
        self._columns = {
            column.name: (RaggedColumn if column.is_ragged else FeatureColumn)(column, parts[column.name])
            for column in outcome.schema.columns
        }

    def __getitem__(self, name: str) -> FeatureColumn:
        """Return a feature map.

        Raises:
            KeyError: No feature map has this name.
        """
        if name not in self._columns:
            raise unknown_name("feature map", name, self._columns)
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def to_pandas(self, names: str | Sequence[str] | None = None) -> Any:
        """Return a pandas DataFrame: a row for each sample, a column for each number.

            features.to_pandas("avgpool")        # columns sample, avgpool[0], avgpool[1], ...

        All rows are read into memory; `save` needs a block.

        Args:
            names: Some of the feature maps; all when None.

        Raises:
            KeyError: No feature map has this name.
            ValueError: There are more than 16,384 numbers for a sample, or rows differ in size.
            MissingExtraError: pandas is missing: pip install "trocar[pandas]".
        """
        from trocar._export.feature_blocks import whole_table

        return whole_table(self, names).to_pandas()

    def save(self, path: str | os.PathLike[str], names: str | Sequence[str] | None = None) -> None:
        """Write the same as one `.csv` or `.parquet` file, block by block.

        Args:
            path: The file; an existing one is replaced once the new one is complete.
            names: Some of the feature maps; all when None.

        Raises:
            KeyError: No feature map has this name.
            ValueError: The file's name ends in neither, there are more than 16,384 numbers for a sample, or
                rows differ in size.
            MissingExtraError: pyarrow is missing, for Parquet: pip install "trocar[pandas]".
            OSError: The file cannot be written; an existing one is as it was.
        """
        from trocar._export.feature_blocks import table_blocks
        from trocar._result.plain_table import check_table_path, save_blocks

        check_table_path(path)
        save_blocks(path, table_blocks(self, names))

    def nearest(
        self,
        query: Any,
        k: int = 10,
        *,
        at: str | None = None,
        metric: "Metric" = "cosine",
        client: "Client | None" = None,
        tap: "Tap | None" = None,
    ) -> "Neighbours":
        """Return the k samples nearest to a query in their features.

            features = trocar.read_features("features/")
            features.nearest("n01443537/img_17.jpg", k=5)       # near a sample of the folder, itself left out
            features.nearest(vector, k=5, metric="euclidean")   # features of your own
            features.nearest("cat.jpg", k=5, client=client)     # an image through the same model and tap

        Exact: every row is compared, in float64, as with faiss' flat indices; of equal distances the row that
        comes first is the nearer. Rows are read in blocks, so memory does not grow with their number. Values
        with positions are compared position by position, flattened; extract with `trocar.pool("avg")` to
        compare what is in a picture rather than where.

        Args:
            query: Without `client`: the key of a sample or a list of keys, or an array of features, one row
                or several. With `client`: inputs of the model, as in `Client.extract`.
            k: How many samples for each query.
            at: Which feature map; may be left out where the folder has one.
            metric: "cosine" (distances are 1 - cosine), "euclidean", or "dot": the largest inner products.
            client: Runs the query through the model of the folder, which must be the same by its digest.
            tap: The tap of the extraction, to run a query where it had more than a selector.

        Returns:
            Places, keys and distances, nearest first; prints as a table and draws the samples. Rows with NaN
            or infinities are left out and named.

        Raises:
            KeyError: No feature map or sample has this name.
            ValueError: `k` exceeds the rows, the query is not finite or does not fit, rows differ in size, or
                the model, its edits or the tap are others than the folder's.
            TrocarError: As `Client.extract`, with `client`.
        """
        from trocar._export.feature_search import search_features  # needs all of the analyses

        return search_features(self, query, k, at, metric, client, tap)

    def __repr__(self) -> str:
        state = "" if self.is_done else ", not done"
        lines = [f"Features of {len(self.sample_keys)} samples in {self.root}{state}:"]
        lines += [f"  {name}  {column.shape}  {column.dtype}" for name, column in self.items()]
        return first_lines("\n".join(lines))

    def _repr_html_(self) -> str:
        """Show a row for each feature map in a notebook."""
        rows = [(name, str(column.shape), str(column.dtype)) for name, column in self.items()]
        state = "" if self.is_done else ", not done"
        caption = f"{len(self.sample_keys):,} samples in {self.root}{state}"
        return html_table(("feature map", "shape", "dtype"), rows, caption)


def _is_as_listed(column: Column, rows: Any, count: int) -> bool:
    if not column.is_ragged:
        return tuple(rows.shape) == (count, *column.row_shape)
    if isinstance(rows, RaggedRows) and not is_consistent(rows, column.row_shape):
        return False
    return tuple(rows.shape) == (count, len(column.row_shape))


def _format(root: Path, job: Mapping[str, Any]) -> ShardFormat:
    name = job.get("format")
    if not isinstance(name, str) or name not in FORMATS:
        raise OutputError(f"{root} has shards of format {shortened(name)}; available: {', '.join(FORMATS)}")
    return FORMATS[name]


def _read(
    path: Path, format: ShardFormat, schema: Schema, count: int
) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Open a shard and check it against the manifest.

    Raises:
        OutputError: It differs, or is damaged; or the format's library is missing.
    """
    format.need()
    try:
        arrays, keys = format.read(path, schema)
        odd = [
            column.name for column in schema.columns if not _is_as_listed(column, arrays[column.name], count)
        ]
    except Exception as error:  # each format's library has its own
        raise OutputError(
            f"{path} cannot be read ({type(error).__name__}: {shortened(error)}); use --restart to write "
            "it again"
        ) from error
    if odd or len(keys) != count or not all(isinstance(key, str) for key in keys):
        raise OutputError(f"{path} differs from {manifest.NAME}; use --restart to write it again")
    return arrays, keys
