"""Plan cache: repeated requests are parsed and converted once.

    planned, chunks, sizes = plans.read(message)
    plan, byte_counts = planned.plan(limits, stored)

Repeated requests have equal bytes except for the tensors. Few steps of a request are slow, but all of them
run with CPU caches that the previous pass has evicted: five times as long as alone, and half a millisecond in
all. What a plan means for a model is kept by the model's deployment, under the same bytes.
"""

from collections import OrderedDict
from collections.abc import Mapping

from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.wire import Chunk
from trocar_server.config import Limits
from trocar_server.engine.request.plan import Plan
from trocar_server.engine.schedule.admission import MethodClass
from trocar_server.rpc.codec.edits import StoredList
from trocar_server.rpc.codec.extract_requests import to_plan
from trocar_server.rpc.codec.replies import CachedHead
from trocar_server.rpc.codec.stored.named_directions import has_directions
from trocar_server.rpc.transfer.messages import KnownMessages, parse_head, split_head

_Content = tuple[tuple[str, bytes], ...]
"""Name and digest of what is stored."""
_KEPT = 128
_MOST_STORED_BYTES = 256 << 10
"""Size limit of the arrays of stored edits and directions that a kept plan holds."""
_MOST_HEAD_BYTES = 2048
"""Size limit of a cached request: its size in memory is proportional."""


class PlannedRequest:
    """The first message of a call, without its tensors.

    Attributes:
        message: The message; not to be changed.
        key: Its bytes; None for a large one, which is not kept.
        shares_memory: Whether values are in shared memory instead of chunks.
        kind: The kind of its work.
        has_stored: Whether it may name stored edits or directions.
        is_plain: Whether it depends on nothing but itself: on no stored edits, adapter or other payloads.
        reply: The signature of the last reply to it.
    """

    def __init__(self, message: pb.ExtractRequest, key: bytes | None) -> None:
        self.message = message
        self.key = key
        self.shares_memory = message.HasField("shared_payload") or message.HasField("shared_reply")
        self.kind = MethodClass.GRADIENTS if message.HasField("objective") else MethodClass.EXTRACT
        self.has_stored = bool(message.edits) or has_directions((), message.taps)
        self.is_plain = not (
            self.shares_memory or message.adapter or self.has_stored or message.payload_digest
        )
        self.reply = CachedHead()
        self._planned: tuple[Limits, _Content, tuple[Plan, list[int]]] | None = None

    def plan(self, limits: Limits, stored: Mapping[str, StoredList]) -> tuple[Plan, list[int]]:
        """Convert and check it; see `to_plan`.

        Raises:
            ServiceError: With the field named.
        """
        content = tuple((name, stored[name].digest) for name in sorted(stored)) if stored else ()
        if stored and sum(one.byte_count for one in stored.values()) > _MOST_STORED_BYTES:
            return to_plan(self.message, limits, stored)
        planned = self._planned
        if planned is None or planned[0] is not limits or planned[1] != content:
            planned = self._planned = (limits, content, to_plan(self.message, limits, stored))
        return planned[2]


class PlanCache:
    """The most recent requests. For one event loop."""

    def __init__(self) -> None:
        self._by_head: OrderedDict[bytes, PlannedRequest] = OrderedDict()
        self._known: KnownMessages[PlannedRequest] = KnownMessages()

    def find(self, head: bytes) -> PlannedRequest | None:
        """Return the request of a head that came before; None if it is not kept."""
        planned = self._by_head.get(head)
        if planned is not None:
            self._by_head.move_to_end(head)
        return planned

    def read(self, message: bytes) -> tuple[PlannedRequest, list[Chunk], list[int] | None]:
        """Split the first message of a call into the request and its chunks as views.

        Returns:
            The request, the chunks, and the sizes of the payloads where it is known that each is one chunk.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, the bytes are not such a message; `REQUEST_TOO_LARGE`.
        """
        known = self._known.find(message)
        if known is not None:
            return known.meaning, known.chunks, known.layout.sizes
        head, chunks = split_head(pb.ExtractRequest, message)
        planned = self.find(head) or self._planned(head)
        if planned.key is not None:
            self._known.keep(message, chunks, planned)
        return planned, chunks, None

    def _planned(self, head: bytes) -> PlannedRequest:
        is_kept = len(head) <= _MOST_HEAD_BYTES
        planned = PlannedRequest(parse_head(pb.ExtractRequest, head), head if is_kept else None)
        if is_kept:
            self._by_head[head] = planned
            if len(self._by_head) > _KEPT:
                self._by_head.popitem(last=False)
        return planned
