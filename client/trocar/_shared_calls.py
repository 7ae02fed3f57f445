"""What one call has of shared memory; knows the messages, not the transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trocar._segments import ALIGNMENT_BYTES, SegmentPool

if TYPE_CHECKING:
    from trocar._replies import ReplyAssembler
    from trocar._requests import ExtractCall
    from trocar._segments import Segment
    from trocar_api.v1.shared_memory_pb2 import SegmentRange


class Borrowed:
    """The segments that one call uses.

    Attributes:
        call: How the call is to be made; None: as it is.
        payload: Where its payloads are, if they were copied.
        reply: Where its reply may go, if that is no array of the caller.
    """

    def __init__(self, pool: SegmentPool) -> None:
        self.pool = pool
        self.call: ExtractCall | None = None
        self.payload: Segment | None = None
        self.reply: Segment | None = None

    def end(self, reply: ReplyAssembler | None) -> None:
        """Give back what the call used.

        A payload's memory can be used again in any case: of a call that has failed nobody sees what the
        server makes of it. That of a reply cannot: after a deadline the server may still be writing.

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


NOTHING = Borrowed(SegmentPool())
"""Of a call that uses chunks only."""


def own_range(pool: SegmentPool, reply: ReplyAssembler, expected: int) -> SegmentRange | None:
    """Return where the one array of `out` lies, if that is a segment and takes all of the reply."""
    own = reply.own_bytes()
    if own is None or expected > own.nbytes:
        return None
    place = pool.find(own.data)
    return place if place is not None and place.offset % ALIGNMENT_BYTES == 0 else None
