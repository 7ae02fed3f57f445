"""Lender: segments of shared memory by principal, within limits."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.shared_memory.call_socket import remove_dead_sockets
from trocar_server.shared_memory.folder import FOLDER, remove_dead
from trocar_server.shared_memory.segment import Segment, rounded

MAX_SEGMENTS = 64
"""Segments of one principal: each costs two file descriptors."""

TOTAL_FACTOR = 4
"""Limit of all principals together, as a multiple of one's, in bytes and in segments."""

UNUSED_S = 600.0
"""The longest time without a call that uses a segment; then it is released. A client that names it
afterwards is told so, and sends chunks."""

_SHARE_OF_FREE = 2
"""A segment takes at most one such part of what is free in the folder: others need shared memory, too."""


def open_lender(limit_bytes: int, folder: Path = FOLDER) -> "Lender | None":
    """Open a lender, or None if not possible; remove leftovers of killed servers.

    Args:
        limit_bytes: The most bytes of one principal; 0 for no lending at all.
        folder: The folder of shared memory.
    """
    if not limit_bytes or not hasattr(os, "posix_fallocate"):
        return None
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        return None
    remove_dead(folder)
    remove_dead_sockets(folder)
    return Lender(limit_bytes, folder)


class Lender:
    """The segments of all callers, by principal. Safe for use by several threads.

    Args:
        limit_bytes: The most bytes of one principal.
        folder: The folder of shared memory.
        clock: Returns seconds that never go back.
    """

    def __init__(
        self, limit_bytes: int, folder: Path = FOLDER, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit_bytes = limit_bytes
        self._clock = clock
        self._folder = folder
        self._lock = Lock()
        self._segments: dict[tuple[str, str], Segment] = {}
        self._reserved: dict[str, list[int]] = {}

    @property
    def folder(self) -> Path:
        """The folder of shared memory."""
        return self._folder

    @property
    def byte_count(self) -> int:
        """Bytes that are lent or about to be."""
        with self._lock:
            return sum(map(sum, self._reserved.values()))

    def byte_count_of(self, principal: str) -> int:
        """Bytes that are lent to a principal or about to be."""
        with self._lock:
            return sum(self._reserved.get(principal, ()))

    def loan(self, principal: str) -> "Loan":
        """Loan with the segments of one stream of a principal; use it in a `with` block."""
        return Loan(self, principal)

    @contextmanager
    def borrow(self, principal: str, segment_id: str) -> Iterator[Segment]:
        """Keep a segment for the length of the context, even when its stream ends meanwhile.

        Raises:
            ServiceError: `UNKNOWN_SEGMENT`: none of this id, somebody else's, or not mapped yet.
        """
        with self._lock:
            segment = self._segments.get((principal, segment_id))
            if segment is None or not segment.is_ready or not segment.retain():
                raise unknown_segment()
        try:
            yield segment
        finally:
            self.mark_used(segment)
            segment.release()

    def mark_used(self, segment: Segment) -> None:
        """Note that a segment is in use at this moment."""
        segment.used_at_s = self._clock()

    def unused_for_s(self, segment: Segment) -> float:
        """Return the seconds since a call ended that used a segment, or since it was mapped; 0 in a call."""
        return 0.0 if segment.is_borrowed else self._clock() - segment.used_at_s

    def make(self, principal: str, byte_count: int) -> Segment:
        """Make a segment within the limits. It takes a while: 0.1 s for 100 MiB.

        Raises:
            ServiceError: `QUOTA_EXCEEDED`, or `STORAGE_FULL` where the folder has too little room.
        """
        byte_count = rounded(byte_count)
        self._reserve(principal, byte_count)
        try:
            self._check_room(byte_count)
            freed = partial(self._unreserve, principal, byte_count)
            segment = Segment(self._folder, byte_count, freed)
        except BaseException as error:
            self._unreserve(principal, byte_count)
            if isinstance(error, OSError):
                raise _no_room(byte_count) from None
            raise
        with self._lock:
            self._segments[principal, segment.id] = segment
        return segment

    def drop(self, principal: str, segment: Segment) -> None:
        """Release a segment; a call that has borrowed it keeps it, and its bytes count, until it ends."""
        with self._lock:
            del self._segments[principal, segment.id]
        segment.release()

    def _check_room(self, byte_count: int) -> None:
        result = os.statvfs(self._folder)
        if byte_count > result.f_bavail * result.f_frsize // _SHARE_OF_FREE:
            raise _no_room(byte_count)

    def _reserve(self, principal: str, byte_count: int) -> None:
        with self._lock:
            own = self._reserved.get(principal, [])
            everybody = [size for sizes in self._reserved.values() for size in sizes]
            for sizes, factor in ((own, 1), (everybody, TOTAL_FACTOR)):
                is_over = sum(sizes) + byte_count > self.limit_bytes * factor
                if is_over or len(sizes) >= MAX_SEGMENTS * factor:
                    raise ServiceError(
                        ErrorReason.QUOTA_EXCEEDED,
                        f"{byte_count:,} bytes of shared memory exceed the limit; close segments first",
                    )
            self._reserved.setdefault(principal, []).append(byte_count)

    def _unreserve(self, principal: str, byte_count: int) -> None:
        with self._lock:
            self._reserved[principal].remove(byte_count)
            if not self._reserved[principal]:
                del self._reserved[principal]


class Loan:
    """The segments of one stream; released when its context ends."""

    def __init__(self, lender: Lender, principal: str) -> None:
        self._lender = lender
        self._principal = principal
        self._segments: dict[str, Segment] = {}
        self._lock = Lock()
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Release every segment."""
        with self._lock:
            self._is_over = True
            ids = list(self._segments)
        for segment_id in ids:
            self.close(segment_id)

    def open(self, byte_count: int) -> Segment:
        """Make a segment; after the end of the context it is gone at once.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, and what `Lender.make` raises.
        """
        if byte_count < 1:
            problem = f"open.byte_count: {byte_count} is not at least 1"
            raise ServiceError(ErrorReason.INVALID_ARGUMENT, problem, field="open.byte_count")
        segment = self._lender.make(self._principal, byte_count)
        with self._lock:
            self._segments[segment.id] = segment
            is_over = self._is_over
        if is_over:  # the call ended while the memory was being made
            self.close(segment.id)
        return segment

    def release_name(self, segment_id: str) -> None:
        """Note that the caller has mapped a segment: its name goes, and calls may use it.

        Raises:
            ServiceError: `UNKNOWN_SEGMENT`, this stream has opened none of this id.
        """
        segment = self._segments.get(segment_id)
        if segment is None:
            raise unknown_segment()
        segment.remove_name()
        self._lender.mark_used(segment)
        segment.is_ready = True

    def expire(self, segment_id: str) -> float | None:
        """Release a segment that has not been mapped, or that no call has used for `UNUSED_S`.

        Returns:
            Seconds after which to look again; None once the segment is released.
        """
        segment = self._segments.get(segment_id)
        if segment is None:
            return None
        left_s = UNUSED_S - self._lender.unused_for_s(segment) if segment.is_ready else 0.0
        if left_s > 0:
            return left_s
        self.close(segment_id)
        return None

    def close(self, segment_id: str) -> None:
        """Release a segment; no effect if already released."""
        with self._lock:
            segment = self._segments.pop(segment_id, None)
        if segment is not None:
            self._lender.drop(self._principal, segment)


def unknown_segment() -> ServiceError:
    """Return the error for an id that this caller cannot use, whatever the cause."""
    return ServiceError(
        ErrorReason.UNKNOWN_SEGMENT,
        "no such shared memory segment; send the bytes in chunks, or open another segment",
    )


def _no_room(byte_count: int) -> ServiceError:
    return ServiceError(
        ErrorReason.STORAGE_FULL, f"not enough free shared memory for {byte_count:,} bytes more"
    )
