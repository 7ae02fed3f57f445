"""Slot: a part of a segment for one prepared call at a time."""

from threading import Lock

import numpy as np
from numpy.typing import NDArray

from trocar_server.shared_memory.segment import Segment


class Slot:
    """A part of a segment, with offsets and a claim of its own.

    Args:
        segment: The segment.
        start: Where the part begins, in bytes.
        byte_count: Its size.
    """

    def __init__(self, segment: Segment, start: int, byte_count: int) -> None:
        self.byte_count = byte_count
        self.retain, self.release = segment.retain, segment.release
        self._segment = segment
        self._start = start
        self._is_written = Lock()

    def read(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Copy bytes out of it; see `Segment.read`."""
        self._segment.read(self._start + offset, out)

    def write(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Copy bytes into it; see `Segment.write`."""
        self._segment.write(self._start + offset, data)

    def claim(self) -> bool:
        """Claim it for one writer; False where another one has it."""
        return self._is_written.acquire(blocking=False)

    def unclaim(self) -> None:
        """Release a claim."""
        self._is_written.release()
