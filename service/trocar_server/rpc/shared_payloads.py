"""The payloads of one call that lie in shared memory instead of in chunks."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from typing import TypeVar

import numpy as np

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1.shared_memory_pb2 import SegmentRange
from trocar_api.wire import Chunk
from trocar_server.engine.plan import Payload
from trocar_server.rpc.fields import invalid
from trocar_server.shared_memory import Lender, Segment
from trocar_server.shared_memory.lender import unknown_segment

Result = TypeVar("Result")

ALIGNMENT_BYTES = 64
"""Every value of a reply begins at a multiple of it."""

# Below, copying takes less time than handing it to another thread.
_LARGE_BYTES = 1 << 20


class SharedPayloads:
    """Where one call's payloads lie, and where its reply may go; both kept for the length of the call."""

    def __init__(
        self,
        payload: tuple[Segment, SegmentRange] | None = None,
        reply: tuple[Segment, SegmentRange] | None = None,
    ) -> None:
        self._payload = payload
        self._reply = reply

    @property
    def has_payload(self) -> bool:
        """Whether the payloads lie in shared memory."""
        return self._payload is not None

    async def payloads(self, byte_counts: Sequence[int], chunks: Sequence[Chunk]) -> list[Payload]:
        """Copy the payloads out; nothing looks at the shared bytes again.

        Args:
            byte_counts: Of each payload.
            chunks: What came in the message, which should be nothing.

        Raises:
            ServiceError: `INVALID_ARGUMENT` or `INVALID_TENSOR`, they are not as announced.
        """
        assert self._payload is not None  # asked before
        segment, place = self._payload
        if chunks:
            raise invalid("shared_payload", "the payloads came in chunks as well; send them one way")
        if place.byte_count != sum(byte_counts):
            problem = f"{place.byte_count:,} bytes where shapes and dtypes make {sum(byte_counts):,}"
            raise invalid("shared_payload.byte_count", problem, ErrorReason.INVALID_TENSOR)
        return await _copied(place.byte_count, partial(_copy_out, segment, place.offset, byte_counts))

    async def place(self, values: Sequence[memoryview]) -> bool:
        """Write the values of a reply; False where they have to go another way.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, the segment was made shorter.
        """
        if self._reply is None:
            return False
        segment, place = self._reply
        sizes = [value.nbytes for value in values]
        if not sum(sizes) or aligned_bytes(sizes) > place.byte_count:
            return False
        return await _copied(sum(sizes), partial(_copy_in, segment, place.offset, values))


NOT_SHARED = SharedPayloads()
"""Of a call with chunks only."""


@contextmanager
def shared_payloads(
    lender: Lender | None, principal: str, request: pb.ExtractRequest
) -> Iterator[SharedPayloads]:
    """Borrow the segments that a call names, until it ends.

    Raises:
        ServiceError: `UNKNOWN_SEGMENT`, or `INVALID_ARGUMENT` for a range that is not within its segment.
    """
    has_payload, has_reply = request.HasField("shared_payload"), request.HasField("shared_reply")
    if not (has_payload or has_reply):
        yield NOT_SHARED
        return
    if lender is None:
        raise unknown_segment()
    with ExitStack() as borrowed:
        payload = reply = None
        if has_payload:
            payload = _borrowed(borrowed, lender, principal, "shared_payload", request.shared_payload)
        if has_reply:
            reply = _borrowed(borrowed, lender, principal, "shared_reply", request.shared_reply)
            if request.shared_reply.offset % ALIGNMENT_BYTES:
                raise invalid("shared_reply.offset", f"is no multiple of {ALIGNMENT_BYTES}")
        if payload and reply and _overlap(payload[1], reply[1]):
            # A call that is tried again would find the reply where its inputs were.
            raise invalid("shared_reply", "overlaps with shared_payload")
        yield SharedPayloads(payload, reply)


def aligned_bytes(byte_counts: Sequence[int]) -> int:
    """Return the bytes that values need, each at a multiple of 64."""
    return sum(map(_aligned, byte_counts[:-1])) + sum(byte_counts[-1:])


def _aligned(byte_count: int) -> int:
    return -(-byte_count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _borrowed(
    borrowed: ExitStack, lender: Lender, principal: str, field: str, place: SegmentRange
) -> tuple[Segment, SegmentRange]:
    segment = borrowed.enter_context(lender.borrow(principal, place.segment_id))
    is_within = place.offset >= 0 and 0 <= place.byte_count <= segment.byte_count - place.offset
    if not is_within:
        problem = f"{place.byte_count:,} bytes from byte {place.offset:,} are not within the segment"
        raise invalid(field, f"{problem}, which has {segment.byte_count:,}")
    return segment, place


def _overlap(one: SegmentRange, other: SegmentRange) -> bool:
    if one.segment_id != other.segment_id:
        return False
    return one.offset < other.offset + other.byte_count and other.offset < one.offset + one.byte_count


async def _copied(byte_count: int, copy: Callable[[], Result]) -> Result:
    """Copy on another thread where it takes long: other calls go on meanwhile, NumPy lets go of the GIL."""
    return copy() if byte_count < _LARGE_BYTES else await asyncio.to_thread(copy)


def _copy_out(segment: Segment, offset: int, byte_counts: Sequence[int]) -> list[Payload]:
    payloads: list[Payload] = [np.empty(count, np.uint8) for count in byte_counts]
    starts = accumulate(byte_counts, initial=offset)
    if segment.retain():  # a cancelled call ends before its thread does
        try:
            for start, payload in zip(starts, payloads, strict=False):
                segment.read(start, payload)
        finally:
            segment.release()
    return payloads


def _copy_in(segment: Segment, offset: int, values: Sequence[memoryview]) -> bool:
    """Write values unless another call, say an attempt at this one that is not over yet, does so now."""
    if not segment.retain():
        return False
    try:
        if not segment.claim():
            return False
        try:
            for value in values:
                segment.write(offset, np.frombuffer(value, np.uint8))
                offset += _aligned(value.nbytes)
        finally:
            segment.unclaim()
    finally:
        segment.release()
    return True
