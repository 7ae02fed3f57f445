"""Open shard: the shard in progress, on disk, from which a killed run resumes.

One file of raw rows for each column, and a journal with one line of JSON for each batch:

    {"shard": 3, "first": 30000}
    {"schema": {...}}                                    only where the manifest has none yet
    {"samples": 16, "keys": ["a.jpg", ...], "failed": [], "crc32": 2868579882}

With `"shapes": {"encoder.layer.3": [[7, 384], [5, 384], ...]}` for feature maps whose rows differ in size.
A batch counts when its line is complete and its rows have the checksum of the line. So neither a kill
between two writes nor a power cut that lost some of them can be taken for finished work, and nothing
has to be flushed to the disk until the shard is complete.
"""

import json
import math
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from trocar._base.tensors import Array, flat_bytes
from trocar._export.ragged import RaggedRows
from trocar._export.schema import Column, Schema

FOLDER = "open-shard"
_JOURNAL = "journal.jsonl"
_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Failure:
    """A sample that has no row."""

    index: int
    """Its place in the source, from 0."""
    key: str
    reason: str
    """The stable reason, or the name of the exception's class."""
    message: str

    @classmethod
    def from_json(cls, outcome: Mapping[str, Any]) -> "Failure":
        """Read what `asdict` made.

        Raises:
            TypeError: It is something else.
        """
        failure = cls(**outcome)
        texts = (failure.key, failure.reason, failure.message)
        if type(failure.index) is not int or not all(isinstance(text, str) for text in texts):
            raise TypeError("a sample that failed has an index, a key, a reason and a message")
        return failure


@dataclass(frozen=True)
class Rows:
    """Rows of one batch."""

    sample_count: int
    """With those that failed."""
    keys: Sequence[str]
    """Of the samples that have a row."""
    arrays: Mapping[str, Array | RaggedRows]
    """Rows by column; empty when every sample failed."""
    failed: Sequence[Failure] = ()


class OpenShard:
    """Rows that are on disk, but not a shard yet.

    Args:
        root: The output's folder.
        number: Index of the shard, from 0.
        first: The index of its first sample.
        schema: Schema of the rows; None before the first batch.
    """

    def __init__(self, root: Path, number: int, first: int, schema: Schema | None) -> None:
        self._folder = root / FOLDER
        self.number = number
        self.first = first
        self.schema = schema
        self.sample_count = 0
        self.keys: list[str] = []
        self.failed: list[Failure] = []
        self._shapes: dict[str, list[list[int]]] = {}
        self._journal: FileIO | None = None
        self._columns: list[FileIO] = []

    def open(self) -> None:
        """Resume from disk, after the last complete batch; or begin."""
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / _JOURNAL
        head = _line({"shard": self.number, "first": self.first})
        kept = self._replay(path, head) if path.is_file() else 0
        self._journal = _opened(path)
        self._journal.truncate(kept)
        if not kept:
            _write(self._journal, head)
        self._open_columns()
        self._journal.seek(0, 2)

    def start(self, schema: Schema) -> None:
        """Record the schema, with the first batch of a run."""
        self.schema = schema
        _write(self._journal, _line({"schema": schema.to_json()}))
        self._open_columns()

    def append(self, rows: Rows) -> None:
        """Add a batch: its rows first, then its line.

        Raises:
            OSError: The disk is full or gone.
        """
        checksum, shapes = 0, {}
        if rows.keys and self.schema is not None:
            for column, file in zip(self.schema.columns, self._columns, strict=True):
                own = rows.arrays[column.name]
                if isinstance(own, RaggedRows):
                    shapes[column.name], own = own.shapes.tolist(), own.values
                data = flat_bytes(np.ascontiguousarray(own)).data
                checksum = zlib.crc32(data, checksum)
                _write(file, data)
        failed = [asdict(failure) for failure in rows.failed]
        entry = {"samples": rows.sample_count, "keys": list(rows.keys), "failed": failed, "crc32": checksum}
        if shapes:
            entry["shapes"] = shapes
        _write(self._journal, _line(entry))
        self._count(entry)

    def arrays(self) -> dict[str, Array | RaggedRows]:
        """Return the rows by column, still on disk."""
        assert self.schema is not None
        return {
            column.name: self._rows(column, self._column_path(position))
            for position, column in enumerate(self.schema.columns)
        }

    def _rows(self, column: Column, path: Path) -> Array | RaggedRows:
        if not column.is_ragged:
            return _mapped(path, column.dtype, (len(self.keys), *column.row_shape))
        rank = len(column.row_shape)
        shapes = np.array(self._shapes.get(column.name, []), np.int64).reshape(len(self.keys), rank)
        return RaggedRows(_mapped(path, column.dtype, (self._held(column) // column.dtype.itemsize,)), shapes)

    def close(self) -> None:
        """Close the files; the batches are kept."""
        for file in (*self._columns, self._journal):
            if file is not None:
                file.close()
        self._columns, self._journal = [], None

    def remove(self) -> None:
        """Close, and delete the files."""
        self.close()
        remove_open_shard(self._folder.parent)

    def _replay(self, path: Path, head: bytes) -> int:
        """Load every complete batch; return the journal's bytes up to there."""
        lines = path.read_bytes().splitlines(keepends=True)
        if not lines or lines[0] != head:
            return 0  # of a shard that was completed just before the kill
        kept = len(head)
        for line in lines[1:]:
            if not self._takes(_parsed(line)):
                break
            kept += len(line)
        return kept

    def _takes(self, entry: dict[str, Any] | None) -> bool:
        """Load one line of the journal; False if it is damaged, so that its batch is run again."""
        if entry is None:
            return False
        try:
            if "schema" in entry:
                self.schema = Schema.from_json(entry["schema"])
                return True
            _check_entry(entry)
            is_whole = bool(self._checksum(entry) == entry["crc32"])
            if is_whole:
                self._count(entry)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return False
        return is_whole

    def _checksum(self, entry: Mapping[str, Any]) -> int | None:
        """Return the checksum of the next rows on disk; None if some are missing."""
        checksum, count = 0, len(entry["keys"])
        for position, column in enumerate(self.schema.columns if self.schema and count else ()):
            path = self._column_path(position)
            if not path.is_file():
                return None
            with path.open("rb") as file:
                file.seek(self._held(column))
                left = _own_bytes(column, count, _shapes_of(entry, column, count))
                while left and (data := file.read(min(left, _READ_BYTES))):
                    checksum = zlib.crc32(data, checksum)
                    left -= len(data)
            if left:
                return None
        return checksum

    def _open_columns(self) -> None:
        for position, column in enumerate(self.schema.columns if self.schema else ()):
            file = _opened(self._column_path(position))
            file.truncate(self._held(column))
            file.seek(0, 2)
            self._columns.append(file)

    def _column_path(self, position: int) -> Path:
        return self._folder / f"column-{position}.bin"

    def _held(self, column: Column) -> int:
        """Return the bytes of a column in complete batches."""
        return _own_bytes(column, len(self.keys), self._shapes.get(column.name, []))

    def _count(self, entry: Mapping[str, Any]) -> None:
        for name, shapes in entry.get("shapes", {}).items():
            self._shapes.setdefault(name, []).extend(shapes)
        failed = [Failure.from_json(failure) for failure in entry["failed"]]
        self.sample_count += entry["samples"]
        self.keys += entry["keys"]
        self.failed += failed


def _mapped(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Map a file into memory; an empty one cannot be."""
    return np.memmap(path, dtype, "r", shape=shape) if math.prod(shape) else np.empty(shape, dtype)


def _own_bytes(column: Column, count: int, shapes: Sequence[Sequence[int]]) -> int:
    """Return the bytes of so many rows, which have these shapes if they differ."""
    if not column.is_ragged:
        return count * column.row_bytes
    return sum(map(math.prod, shapes)) * column.dtype.itemsize


def _shapes_of(entry: Mapping[str, Any], column: Column, count: int) -> Sequence[Sequence[int]]:
    """Return the shapes of a batch's rows from its line.

    Raises:
        KeyError, TypeError, ValueError: They are not those of so many rows.
    """
    if not column.is_ragged:
        return ()
    shapes: list[list[int]] = entry["shapes"][column.name]
    if len(shapes) != count or any(len(shape) != len(column.row_shape) for shape in shapes):
        raise ValueError("every row has a shape")
    if any(type(size) is not int or size < 0 for shape in shapes for size in shape):
        raise ValueError("a shape has whole sizes")
    return shapes


def remove_open_shard(root: Path) -> None:
    """Delete a shard in progress if it exists."""
    shutil.rmtree(root / FOLDER, ignore_errors=True)


def _opened(path: Path) -> FileIO:
    """Open for reading and writing, without a buffer: written data survives a kill."""
    path.touch()
    return FileIO(path, "r+")


def _write(file: FileIO | None, data: bytes | memoryview) -> None:
    assert file is not None
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) else None


def _check_entry(entry: Mapping[str, Any]) -> None:
    keys, failed = entry["keys"], entry["failed"]
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise TypeError("keys are texts")
    if type(entry["samples"]) is not int or entry["samples"] != len(keys) + len(failed):
        raise ValueError("every sample has a row or a reason")
