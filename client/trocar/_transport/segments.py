"""Segments: shared memory lent by a server on this host, as NumPy arrays; knows no calls.

Note: [Lifetime of segments]
    Arrays of a reply are views of a segment, and keep it: it is reused when the last of them is freed,
    wherever that happens (a finalizer of the array that all of them are views of). So a result stays valid
    as long as it is referenced, and a copy is the caller's choice. When many results are referenced, the
    server's limit is reached, and further replies are sent in chunks.
"""

import mmap
import os
import re
import stat
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from weakref import finalize

import numpy as np

from trocar._base.tensors import Bytes
from trocar_api.v1.shared_memory_pb2 import Segment as WireSegment
from trocar_api.v1.shared_memory_pb2 import SegmentRange

FOLDER = Path("/dev/shm")
"""Where Linux has shared memory, see shm_overview(7)."""
PAYLOADS_SHARED_FROM_BYTES = 512 << 10
"""The fewest bytes of inputs that go through shared memory: of 256 KiB a call takes as long either way, of
600 KiB 0.6 of the time, of 4 MiB 0.3."""
REPLY_SHARED_FROM_BYTES = 1 << 20
"""The same of a reply, which keeps its segment for as long as it is held."""
ALIGNMENT_BYTES = 64
"""Every value of a reply begins at a multiple of it."""

_NAME = re.compile(r"trocar-[0-9a-f]{32}")
_STEP_PARTS = 16
_MAX_LEARNED = 256


class Segment:
    """A mapped segment.

    Args:
        segment_id: Its id on the server.
        memory: The mapping; it lives as long as an array on it.
    """

    def __init__(self, segment_id: str, memory: mmap.mmap) -> None:
        self.id = segment_id
        self._memory = memory
        self.byte_count = len(memory)
        self.address = np.frombuffer(memory, np.uint8).ctypes.data

    def array(self) -> Bytes:
        """Return all of it as a new array, whose views keep it alive."""
        return np.frombuffer(self._memory, np.uint8)

    def range(self, byte_count: int, offset: int = 0) -> SegmentRange:
        """Return a range of its bytes as a message."""
        return SegmentRange(segment_id=self.id, offset=offset, byte_count=byte_count)


def map_segment(message: WireSegment, folder: Path = FOLDER) -> Segment:
    """Map a segment of the server.

    Raises:
        OSError: It does not exist: another host, or another namespace.
        ValueError: The file is not one of a server of this user.
    """
    if not _NAME.fullmatch(message.name):
        raise ValueError(f"{message.name!r} is not a valid segment name")
    descriptor = os.open(folder / message.name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        result = os.fstat(descriptor)
        is_ours = result.st_uid == os.geteuid() and not stat.S_IMODE(result.st_mode) & 0o077
        if not (stat.S_ISREG(result.st_mode) and is_ours and 0 < message.byte_count <= result.st_size):
            raise ValueError("the segment's file was not created by a server of this user")
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return Segment(message.id, mmap.mmap(descriptor, message.byte_count, flags))
    finally:
        os.close(descriptor)


class SegmentPool:
    """The free segments of one connection to a server. Thread-safe.

    pool = SegmentPool()
    segment = pool.take(6 << 20)        # None: open one and use it
    array = pool.lend(segment)          # it comes back when the last view of the array is gone
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._segments: dict[str, Segment] = {}
        self._free: list[Segment] = []
        # Finalizers run at any moment, also while the lock is held by the very thread: they only append.
        self._returned: deque[Segment] = deque()
        self._discarded: list[str] = []

    def __len__(self) -> int:
        return len(self._segments)

    def add(self, segment: Segment) -> None:
        """Add an opened segment; it is in use."""
        with self._lock:
            self._segments[segment.id] = segment

    def take(self, byte_count: int) -> Segment | None:
        """Return the smallest free segment of at least so many bytes, now in use, or None."""
        with self._lock:
            self._collect()
            fitting = [segment for segment in self._free if segment.byte_count >= byte_count]
            if not fitting:
                return None
            chosen = min(fitting, key=lambda segment: segment.byte_count)
            self._free.remove(chosen)
            return chosen

    def give_back(self, segment: Segment) -> None:
        """Return a segment for reuse."""
        self._returned.append(segment)

    def lend(self, segment: Segment) -> Bytes:
        """Return a segment's memory as an array that gives it back when the last view of it is gone."""
        array = segment.array()
        finalize(array, self.give_back, segment).atexit = False
        return array

    def discard(self, segment: Segment) -> None:
        """Drop a segment that must not be reused."""
        with self._lock:
            self._drop(segment)

    def discard_free(self) -> bool:
        """Drop every free segment, to make room for one of another size; False without one."""
        with self._lock:
            self._collect()
            free, self._free = self._free, []
            for segment in free:
                self._drop(segment)
            return bool(free)

    def discarded(self) -> list[str]:
        """Return the ids of segments dropped since the last call, for the server."""
        with self._lock:
            ids, self._discarded = self._discarded, []
            return ids

    def find(self, payload: memoryview) -> SegmentRange | None:
        """Return the range of bytes, if they are in a segment of this pool."""
        address = np.frombuffer(payload, np.uint8).ctypes.data if payload.nbytes else 0
        with self._lock:
            for segment in self._segments.values():
                offset = address - segment.address
                if 0 <= offset <= segment.byte_count - payload.nbytes:
                    return segment.range(payload.nbytes, offset)
        return None

    def end(self) -> None:
        """Drop everything: the server has reclaimed it. Arrays stay valid as long as they are referenced."""
        with self._lock:
            self._segments.clear()
            self._free.clear()

    def _drop(self, segment: Segment) -> None:
        if self._segments.pop(segment.id, None) is not None:
            self._discarded.append(segment.id)

    def _collect(self) -> None:
        while self._returned:
            segment = self._returned.popleft()
            if segment.id in self._segments:
                self._free.append(segment)


class ReplySizes:
    """Sizes of replies to equal requests: a request names the place of its reply in advance.

    Attributes:
        expected: Bytes of the last reply by the hash of its request; not to be changed.
    """

    def __init__(self) -> None:
        self.expected: OrderedDict[int, int] = OrderedDict()
        self._lock = Lock()

    def learn(self, head: bytes, byte_counts: Sequence[int]) -> None:
        """Record the sizes of the values of a reply."""
        end = placed(byte_counts)[-1]
        with self._lock:
            self.expected[hash(head)] = end
            self.expected.move_to_end(hash(head))
            while len(self.expected) > _MAX_LEARNED:
                self.expected.popitem(last=False)


def placed(byte_counts: Sequence[int]) -> list[int]:
    """Return the offset of each value of a reply, then the end of the last one."""
    offsets, start, end = [], 0, 0
    for count in byte_counts:
        offsets.append(start)
        end = start + count
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return [*offsets, end]


def segment_size(byte_count: int) -> int:
    """Return the size to request: a little more, so that calls of about the same size share segments."""
    step = max(1 << 20, (1 << byte_count.bit_length()) // _STEP_PARTS)
    return -(-byte_count // step) * step


def copy_payloads(payloads: Sequence[memoryview], target: Bytes) -> None:
    """Write payloads one after the other."""
    start = 0
    for payload in payloads:
        end = start + payload.nbytes
        np.copyto(target[start:end], np.frombuffer(payload, np.uint8))
        start = end
