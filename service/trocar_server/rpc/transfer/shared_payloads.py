"""Shared payloads: payloads of one call in shared memory instead of in chunks."""

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
from trocar_server.engine.request.plan import Payload
from trocar_server.engine.schedule.admission import Reservation
from trocar_server.rpc.codec.fields import invalid
from trocar_server.shared_memory import Lender, Segment, Slot
from trocar_server.shared_memory.lender import unknown_segment

Result = TypeVar("Result")

ALIGNMENT_BYTES = 64
"""Alignment in bytes of every value of a reply."""

# Below this size copying takes less time than handing it to another thread.
_LARGE_BYTES = 1 << 20


class SharedPayloads:
    """Segments of one call's payloads and of its reply; both are retained for the call."""

    def __init__(
        self,
        payload: tuple[Segment | Slot, SegmentRange] | None = None,
        reply: tuple[Segment | Slot, SegmentRange] | None = None,
    ) -> None:
        self._payload = payload
        self._reply = reply
        self.has_payload = payload is not None
        """Whether the payloads are in shared memory."""
        self.has_reply = reply is not None
        """Whether there is room for the values of the reply in shared memory."""

    async def receive(
        self, byte_counts: Sequence[int], chunks: Sequence[Chunk], reservation: Reservation
    ) -> list[Payload]:
        """Copy the payloads out; the shared bytes are not read again.

        Args:
            byte_counts: The size of each payload.
            chunks: The message's chunks, which should be empty.
            reservation: Grows by the payloads.

        Raises:
            ServiceError: `INVALID_ARGUMENT` or `INVALID_TENSOR`, they are not as announced.
        """
        assert self._payload is not None  # asked before
        segment, place = self._payload
        reservation.grow(sum(byte_counts))
        if chunks:
            raise invalid("shared_payload", "the payloads were also sent in chunks; use one of the two")
        if place.byte_count != sum(byte_counts):
            problem = f"{place.byte_count:,} bytes where shapes and dtypes make {sum(byte_counts):,}"
            raise invalid("shared_payload.byte_count", problem, ErrorReason.INVALID_TENSOR)
        return await _copied(place.byte_count, partial(_copy_out, segment, place.offset, byte_counts))

    def arrived(self, byte_counts: Sequence[int]) -> Callable[[], list[Payload]] | None:
        """Return what copies the payloads out; None if that takes long, or they are not as announced.

        Args:
            byte_counts: The size of each payload.
        """
        assert self._payload is not None  # asked before
        segment, place = self._payload
        if place.byte_count >= _LARGE_BYTES or place.byte_count != sum(byte_counts):
            return None
        return partial(_copy_out, segment, place.offset, byte_counts)

    async def place(self, values: Sequence[memoryview]) -> bool:
        """Write the values of a reply; False if they must be sent in chunks.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, the segment was truncated.
        """
        if self._reply is None:
            return False
        segment, place = self._reply
        sizes = [value.nbytes for value in values]
        if not sum(sizes) or aligned_bytes(sizes) > place.byte_count:
            return False
        return await _copied(sum(sizes), partial(_copy_in, segment, place.offset, values))


NOT_SHARED = SharedPayloads()
"""Shared payloads of a call with chunks only."""


@contextmanager
def shared_payloads(
    lender: Lender | None, principal: str, request: pb.ExtractRequest
) -> Iterator[SharedPayloads]:
    """Borrow the segments that a call names, until it ends.

    Raises:
        ServiceError: `UNKNOWN_SEGMENT`, or `INVALID_ARGUMENT` for a range outside its segment.
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
                raise invalid("shared_reply.offset", f"must be a multiple of {ALIGNMENT_BYTES}")
        if payload and reply and _overlap(payload[1], reply[1]):
            # A retried call would find the reply in place of its inputs.
            raise invalid("shared_reply", "overlaps with shared_payload")
        yield SharedPayloads(payload, reply)


def aligned_bytes(byte_counts: Sequence[int]) -> int:
    """Byte count of the values, each aligned to 64."""
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
    """Copy on another thread if it takes long: other calls continue, NumPy releases the GIL."""
    return copy() if byte_count < _LARGE_BYTES else await asyncio.to_thread(copy)


def _copy_out(segment: Segment | Slot, offset: int, byte_counts: Sequence[int]) -> list[Payload]:
    payloads: list[Payload] = [np.empty(count, np.uint8) for count in byte_counts]
    starts = accumulate(byte_counts, initial=offset)
    if segment.retain():  # a cancelled call ends before its thread does
        try:
            for start, payload in zip(starts, payloads, strict=False):
                segment.read(start, payload)
        finally:
            segment.release()
    return payloads


def _copy_in(segment: Segment | Slot, offset: int, values: Sequence[memoryview]) -> bool:
    """Write values unless another call, such as an unfinished attempt of this one, is writing."""
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
