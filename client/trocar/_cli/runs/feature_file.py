"""Feature file: safetensors, written batch by batch, so that memory keeps one batch, not the whole run.

The first batch determines the row's shape and the number of rows is known, so the header is written
first and each batch to its offset.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from trocar._base.replacement import open_replacement
from trocar._base.tensors import Array, flat_bytes
from trocar._cli.failures import fail
from trocar._export.writers.safetensors_writer import header


@dataclass
class _Column:
    """One feature map in the file."""

    shape: tuple[int, ...]
    """Of all samples together."""
    dtype: np.dtype[Any]
    position: int
    """Where the next batch goes, in bytes from the file's start."""


class FeatureFile:
    """Writes the feature maps of all samples to one file, which appears when it is complete.

        with FeatureFile(Path("features.safetensors"), sample_count=1000, is_one_batch=False) as file:
            file.append(maps, batch_size=16, batch_name="a.jpg to p.jpg", metadata={})

    Args:
        path: Path of the file; an existing one is replaced, its mode stays.
        sample_count: Final number of rows of every feature map.
        is_one_batch: Whether one batch has all samples: nothing is joined, so any shape is accepted.
    """

    def __init__(self, path: Path, *, sample_count: int, is_one_batch: bool) -> None:
        self._path = path
        self._sample_count = sample_count
        self._is_one_batch = is_one_batch
        self._columns: dict[str, _Column] = {}

    def __enter__(self) -> Self:
        self._context = open_replacement(self._path)
        self._file = self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, traceback)  # the file is closed before it gets its name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every feature map, all samples included."""
        return {name: column.shape for name, column in self._columns.items()}

    def append(
        self, maps: Mapping[str, Array], *, batch_size: int, batch_name: str, metadata: Mapping[str, str]
    ) -> None:
        """Write the rows of the next batch; the first one decides names, shapes and metadata.

        Args:
            maps: The feature maps of the batch.
            batch_size: Number of its samples.
            batch_name: Its name in messages.
            metadata: Goes into the header, with the first batch only.

        Raises:
            typer.Exit: The feature maps cannot be joined.
            OutputError: The file format has no such dtype.
            OSError: The file cannot be written.
        """
        if not self._is_one_batch:
            _check_rows(maps, batch_size, batch_name)
        if not self._columns:
            self._begin(maps, metadata)
        if maps.keys() != self._columns.keys():
            names = ", ".join(sorted(maps.keys() ^ self._columns.keys()))
            fail(
                f"{batch_name}: not every batch gave {names}; which modules run depends on the data; use "
                "--batch 1"
            )
        for name, values in maps.items():
            self._write(name, values, batch_name)

    def _begin(self, maps: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
        specs = {
            name: (
                values.dtype,
                values.shape if self._is_one_batch else (self._sample_count, *values.shape[1:]),
            )
            for name, values in maps.items()
        }
        before, starts = header(specs, metadata)
        self._file.write(before)
        for name, start in starts.items():
            dtype, shape = specs[name]
            self._columns[name] = _Column(shape, dtype, start)

    def _write(self, name: str, values: Array, batch_name: str) -> None:
        column = self._columns[name]
        if values.shape[1:] != column.shape[1:] or values.dtype != column.dtype:
            fail(
                f"{batch_name}: '{name}' has rows of shape {values.shape[1:]}, {values.dtype}; earlier "
                "ones have "
                f"{column.shape[1:]}, {column.dtype}. These cannot be joined in one array: use images of "
                "one "
                "size, or one run for each size"
            )
        self._file.seek(column.position)
        self._file.write(flat_bytes(np.ascontiguousarray(values)).data)
        column.position += values.nbytes


def _check_rows(maps: Mapping[str, Array], batch_size: int, batch_name: str) -> None:
    for name, values in maps.items():
        if values.ndim == 0 or values.shape[0] != batch_size:
            fail(
                f"{batch_name}: '{name}' has shape {values.shape}; its first dimension is not the batch of "
                f"{batch_size}, so batches cannot be joined. Use a --batch that holds all images"
            )
