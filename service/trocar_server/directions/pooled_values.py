"""Pooled values on disk: a row for each sample at each place, within a budget of bytes.

    budget = PooledValuesBudget(8 << 30)
    with PooledValues(folder, budget, {"layer3": 768}, 2_000) as values:
        values.write("layer3", 0, rows)          # (batch, 768 + 1), float32: the last is the norm
        values.rows("layer3").blocks()

A file has no name: it is gone when it is closed, also when the process is killed.
"""

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trocar_api.reasons import ErrorReason
from trocar_server.directions.direction_request import rejected
from trocar_server.errors import ServiceError
from trocar_server.storage.disk_errors import disk_errors

Floats: TypeAlias = NDArray[np.float64]

BLOCK_BYTES = 32 << 20
"""About the most bytes of float64 that are read at once."""
_ITEM_BYTES = 4


class PooledValuesBudget:
    """The bytes that all fits of a server may have on disk. Thread-safe.

    Args:
        max_bytes: The most bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._used = 0
        self._lock = threading.Lock()

    def take(self, byte_count: int, described: str) -> None:
        """Reserve bytes.

        Args:
            byte_count: Their number.
            described: What needs them, for the error.

        Raises:
            ServiceError: `DIRECTION_REJECTED`, they never fit; `SERVER_BUSY`, not now.
        """
        with self._lock:
            if byte_count > self.max_bytes:
                raise rejected(
                    f"{described} are {byte_count:,} bytes, and the server keeps {self.max_bytes:,} for "
                    "fits of directions; give fewer samples or places, or ask its operator for a higher "
                    "`limits.max_direction_fit_bytes`"
                )
            if self._used + byte_count > self.max_bytes:
                raise ServiceError(
                    ErrorReason.SERVER_BUSY,
                    f"{described} are {byte_count:,} bytes, and other fits of directions have "
                    f"{self._used:,} of the server's {self.max_bytes:,}; try again when they have ended",
                )
            self._used += byte_count

    def give_back(self, byte_count: int) -> None:
        """End a reservation."""
        with self._lock:
            self._used -= byte_count


class PooledValues:
    """Rows of each place in one file.

    Not for the event loop: every method may block on the disk.

    Args:
        folder: The folder of the file; made if needed.
        budget: The budget of the server.
        channels: The channels of each place, by its name, in order.
        sample_count: The rows of each place.

    Raises:
        ServiceError: As `PooledValuesBudget.take`; `DIRECTIONS_UNAVAILABLE`, the disk does not take them.
    """

    def __init__(
        self, folder: Path, budget: PooledValuesBudget, channels: Mapping[str, int], sample_count: int
    ) -> None:
        self._budget, self._channels, self._count = budget, dict(channels), sample_count
        self._starts: dict[str, int] = {}
        self._bytes = 0
        for place, count in channels.items():
            self._starts[place] = self._bytes
            self._bytes += _ITEM_BYTES * (count + 1) * sample_count
        self._descriptor = -1
        described = f"the pooled values of {sample_count:,} samples at {len(channels)} places"
        budget.take(self._bytes, described)
        try:
            self._open(folder)
        except BaseException:
            budget.give_back(self._bytes)
            raise

    def _open(self, folder: Path) -> None:
        with disk_errors("pooled values", ErrorReason.DIRECTIONS_UNAVAILABLE):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor, name = tempfile.mkstemp(prefix="pooled-", dir=folder)
            try:
                os.unlink(name)  # noqa: PTH108 - by the descriptor alone
                os.posix_fallocate(self._descriptor, 0, max(1, self._bytes))
            except BaseException:
                os.close(self._descriptor)
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def byte_count(self) -> int:
        """Bytes on disk."""
        return self._bytes

    @property
    def places(self) -> tuple[str, ...]:
        """The names of the places, in order."""
        return tuple(self._channels)

    def width(self, place: str) -> int:
        """Return the numbers in a row of a place: its channels, and the norm."""
        return self._channels[place] + 1

    def write(self, place: str, first: int, rows: memoryview) -> None:
        """Write rows.

        Args:
            place: The place.
            first: The sample of the first row.
            rows: Whole rows of float32, channels and the norm.

        Raises:
            ServiceError: `DIRECTIONS_UNAVAILABLE`.
        """
        row_bytes = _ITEM_BYTES * self.width(place)
        start, rest = self._starts[place] + first * row_bytes, memoryview(rows).cast("B")
        with disk_errors("pooled values", ErrorReason.DIRECTIONS_UNAVAILABLE):
            while rest.nbytes:
                written = os.pwrite(self._descriptor, rest, start)
                start, rest = start + written, rest[written:]

    def blocks(self, place: str) -> Iterator[Floats]:
        """Yield the rows of a place in float64, a block after another, with the norm last."""
        width = self.width(place)
        height = max(1, BLOCK_BYTES // (8 * width))
        for first in range(0, self._count, height):
            count = min(height, self._count - first)
            yield self._read(place, first, count)

    def _read(self, place: str, first: int, count: int) -> Floats:
        row_bytes = _ITEM_BYTES * self.width(place)
        start, total = self._starts[place] + first * row_bytes, count * row_bytes
        buffer = bytearray(total)
        with disk_errors("pooled values", ErrorReason.DIRECTIONS_UNAVAILABLE):
            view = memoryview(buffer)
            while view.nbytes:
                read = os.preadv(self._descriptor, [view], start)
                if not read:
                    raise OSError("the file is shorter than it was")
                start, view = start + read, view[read:]
        return np.frombuffer(buffer, np.float32).reshape(count, self.width(place)).astype(np.float64)

    def close(self) -> None:
        """Remove the values. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._budget.give_back(self._bytes)
