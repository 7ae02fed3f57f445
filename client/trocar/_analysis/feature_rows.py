"""Feature rows: the features of all samples on disk, read back in blocks of a few features."""

import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import numpy as np

from trocar._analysis.moments import Floats
from trocar._base.tensors import Array

_BLOCK_BYTES = 32 << 20


class FeatureRows:
    """One feature map, a row for each sample; an unnamed temporary file, deleted on close.

        with FeatureRows("layer4") as rows:
            rows.append(maps["layer4"])      # for each batch
            for block in rows.blocks(): ...  # float64 (samples, some features)

    Memory holds a batch, or a block. The file is in Python's temporary folder (`TMPDIR`).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self._file = tempfile.TemporaryFile(prefix="trocar-")  # noqa: SIM115 - closed by close
        self._dtype: np.dtype[np.generic] | None = None
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Delete the file."""
        self._file.close()

    def append(self, values: Array) -> None:
        """Append samples, of shape (samples, ...).

        Raises:
            ValueError: There is no dimension of samples, the samples have another size or dtype than those
                before, or the numbers are complex.
        """
        if not values.ndim:
            raise ValueError(f"{self.name!r} is a single number; features need one row per sample")
        if np.iscomplexobj(values):
            raise ValueError(f"{self.name!r} is complex; only real values are compared")
        width = int(np.prod(values.shape[1:]))
        if self._dtype is None:
            self._dtype, self._width = values.dtype, width
        if width != self._width or values.dtype != self._dtype:
            raise ValueError(
                f"{self.name!r} has {self._width} features ({self._dtype}) in one batch and {width} "
                f"({values.dtype}) in another; use inputs of one size, or pool the positions"
            )
        self._file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        self.count += len(values)

    def blocks(self) -> Iterator[Floats]:
        """Yield the features of all samples, a block of columns at a time, in float64."""
        if self._dtype is None or not self.count * self._width:
            return
        self._file.flush()
        rows = np.memmap(self._file, self._dtype, mode="r", shape=(self.count, self._width))
        step = max(_BLOCK_BYTES // (8 * self.count), 1)
        for start in range(0, self._width, step):
            yield np.asarray(rows[:, start : start + step], np.float64)
