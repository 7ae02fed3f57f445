"""Requests that came before: understood and described once.

    known, chunks = requests.read(message)
    plan, byte_counts = known.plan(limits, stored)

Who asks again sends the same bytes but for the tensors. Little of what is done for a request is slow, but all
of it runs with caches that the pass before has emptied: five times as long as on its own, and half a
millisecond in all.
"""

from collections import OrderedDict
from collections.abc import Mapping

from google.protobuf.message import DecodeError

from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.wire import Chunk
from trocar_server.config import Limits
from trocar_server.engine.plan import Plan
from trocar_server.rpc.edits import StoredList
from trocar_server.rpc.messages import not_a_message, split_head
from trocar_server.rpc.replies import ReplyForm
from trocar_server.rpc.requests import to_plan

_KEPT = 128
_MOST_HEAD_BYTES = 2048
"""Of a request that is kept: what it becomes in memory is in proportion."""


class KnownRequest:
    """The first message of a call, without its tensors.

    Attributes:
        message: The message; not to be changed.
        reply: The form of the last reply to it.
    """

    def __init__(self, message: pb.ExtractRequest) -> None:
        self.message = message
        self.reply = ReplyForm()
        self._planned: tuple[Limits, Plan, list[int]] | None = None

    def plan(self, limits: Limits, stored: Mapping[str, StoredList]) -> tuple[Plan, list[int]]:
        """Convert and check it; see `to_plan`.

        Raises:
            ServiceError: With the field named.
        """
        if stored:  # which may be another list by now
            return to_plan(self.message, limits, stored)
        if self._planned is None or self._planned[0] is not limits:
            self._planned = (limits, *to_plan(self.message, limits))
        return self._planned[1:]


class KnownRequests:
    """The requests that were asked last. For one event loop."""

    def __init__(self) -> None:
        self._by_head: OrderedDict[bytes, KnownRequest] = OrderedDict()

    def read(self, message: bytes) -> tuple[KnownRequest, list[Chunk]]:
        """Split the first message of a call into the request and its chunks as views.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, the bytes are no such message; `REQUEST_TOO_LARGE`.
        """
        head, chunks = split_head(pb.ExtractRequest, message)
        known = self._by_head.get(head)
        if known is not None:
            self._by_head.move_to_end(head)
            return known, chunks
        try:
            known = KnownRequest(pb.ExtractRequest.FromString(head))
        except DecodeError as error:
            raise not_a_message(pb.ExtractRequest, error) from None
        if len(head) <= _MOST_HEAD_BYTES:
            self._by_head[head] = known
            if len(self._by_head) > _KEPT:
                self._by_head.popitem(last=False)
        return known, chunks
