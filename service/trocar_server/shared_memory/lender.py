"""Who has which segment, and how much of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.shared_memory.folder import FOLDER, remove_dead
from trocar_server.shared_memory.segment import Segment, rounded

MAX_SEGMENTS = 64
"""Segments of one principal: each costs two file descriptors."""

TOTAL_FACTOR = 4
"""All principals together may have so many times as much as one, in bytes and in segments."""

_SHARE_OF_FREE = 2
"""A segment takes at most one such part of what is free in the folder: others need shared memory, too."""


def open_lender(limit_bytes: int, folder: Path = FOLDER) -> "Lender | None":
    """Return what lends memory, or None where that is not possible; remove what killed servers left.

    Args:
        limit_bytes: The most bytes of one principal; 0 for no lending at all.
        folder: The folder of shared memory.
    """
    if not limit_bytes or not hasattr(os, "posix_fallocate"):
        return None
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        return None
    remove_dead(folder)
    return Lender(limit_bytes, folder)


class Lender:
    """The segments of all callers, by principal. Safe for use by several threads.

    Args:
        limit_bytes: The most bytes of one principal.
        folder: The folder of shared memory.
    """

    def __init__(self, limit_bytes: int, folder: Path = FOLDER) -> None:
        self.limit_bytes = limit_bytes
        self._folder = folder
        self._lock = Lock()
        self._segments: dict[tuple[str, str], Segment] = {}
        self._reserved: dict[str, list[int]] = {}

    @property
    def byte_count(self) -> int:
        """Bytes that are lent or about to be."""
        with self._lock:
            return sum(map(sum, self._reserved.values()))

    def loan(self, principal: str) -> "Loan":
        """Return what holds the segments of one stream of a principal; use it in a `with` block."""
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
            segment.release()

    def make(self, principal: str, byte_count: int) -> Segment:
        """Make a segment within the limits. It takes a while: 0.1 s for 100 MiB.

        Raises:
            ServiceError: `QUOTA_EXCEEDED`, or `STORAGE_FULL` where the folder has too little room.
        """
        byte_count = rounded(byte_count)
        self._reserve(principal, byte_count)
        try:
            self._check_room(byte_count)
            segment = Segment(self._folder, byte_count)
        except BaseException as error:
            self._unreserve(principal, byte_count)
            if isinstance(error, OSError):
                raise _no_room(byte_count) from None
            raise
        with self._lock:
            self._segments[principal, segment.id] = segment
        return segment

    def drop(self, principal: str, segment: Segment) -> None:
        """Take a segment back; whoever borrows it now keeps it until his call ends."""
        with self._lock:
            del self._segments[principal, segment.id]
        self._unreserve(principal, segment.byte_count)
        segment.release()

    def _check_room(self, byte_count: int) -> None:
        found = os.statvfs(self._folder)
        if byte_count > found.f_bavail * found.f_frsize // _SHARE_OF_FREE:
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
                        f"{byte_count:,} bytes of shared memory are over the limit; close segments first",
                    )
            self._reserved.setdefault(principal, []).append(byte_count)

    def _unreserve(self, principal: str, byte_count: int) -> None:
        with self._lock:
            self._reserved[principal].remove(byte_count)
            if not self._reserved[principal]:
                del self._reserved[principal]


class Loan:
    """The segments of one stream; they go when its context ends."""

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
        """Take every segment back."""
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
        segment.is_ready = True

    def expire(self, segment_id: str) -> None:
        """Take back a segment that has not been mapped; nothing happens to others."""
        segment = self._segments.get(segment_id)
        if segment is not None and not segment.is_ready:
            self.close(segment_id)

    def close(self, segment_id: str) -> None:
        """Take a segment back; one that is not there is gone already."""
        with self._lock:
            segment = self._segments.pop(segment_id, None)
        if segment is not None:
            self._lender.drop(self._principal, segment)


def unknown_segment() -> ServiceError:
    """Return the error for an id that this caller cannot use, whatever the cause."""
    return ServiceError(
        ErrorReason.UNKNOWN_SEGMENT,
        "there is no such segment of shared memory; send the bytes in chunks, or open another",
    )


def _no_room(byte_count: int) -> ServiceError:
    return ServiceError(
        ErrorReason.STORAGE_FULL, f"there is too little shared memory for {byte_count:,} bytes more"
    )
