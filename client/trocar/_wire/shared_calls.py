"""Shared memory of one call; knows the messages, not the transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trocar._transport.segments import ALIGNMENT_BYTES, SegmentPool

if TYPE_CHECKING:
    from trocar._transport.segments import Segment
    from trocar._wire.replies import ReplyAssembler
    from trocar._wire.requests import ExtractCall
    from trocar_api.v1.shared_memory_pb2 import SegmentRange


class Borrowed:
    """The segments that one call uses.

    Attributes:
        call: The call to make; None: unchanged.
        payload: Place of its payloads, if they were copied.
        reply: Place of its reply, if that is no array of the caller.
    """

    def __init__(self, pool: SegmentPool) -> None:
        self.pool = pool
        self.call: ExtractCall | None = None
        self.payload: Segment | None = None
        self.reply: Segment | None = None

    def end(self, reply: ReplyAssembler | None) -> None:
        """Return the segments of the call.

        A payload's memory can be reused in any case: the result of a failed call
        is never seen. That of a reply cannot: after a deadline the server may still be writing.

        Args:
            reply: Of a call that ended well; None of one that did not.
        """
        if self.payload is not None:
            self.pool.give_back(self.payload)
        if self.reply is None:
            return
        if reply is None:
            self.pool.discard(self.reply)
        elif not reply.is_shared:
            self.pool.give_back(self.reply)

    def discard(self) -> None:
        """Drop the segments of a call that was interrupted before it began.

        The copy of its payload may still be running in another thread.
        """
        for segment in (self.payload, self.reply):
            if segment is not None:
                self.pool.discard(segment)


NOTHING = Borrowed(SegmentPool())
"""Of a call that uses chunks only."""


def own_range(pool: SegmentPool, reply: ReplyAssembler, expected: int) -> SegmentRange | None:
    """Return the range of the one array of `out`, if that is a segment and takes all of the reply."""
    own = reply.own_bytes()
    if own is None or expected > own.nbytes:
        return None
    place = pool.find(own.data)
    return place if place is not None and place.offset % ALIGNMENT_BYTES == 0 else None
