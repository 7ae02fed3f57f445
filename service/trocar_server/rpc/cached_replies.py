"""The feature cache between requests and the engine: what counts as the same question, and its answer.

question = replies.question(principal, request, stored)
key = await key_of(question, payloads)
kept = replies.find(key)
"""

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1.execution_pb2 import ExecutionReport
from trocar_server.engine.engine import Engine
from trocar_server.engine.outcome import Extraction
from trocar_server.engine.plan import Payload, Plan, row_count
from trocar_server.engine.reply_cache import KeptReply
from trocar_server.errors import ServiceError
from trocar_server.rpc.edits import StoredList
from trocar_server.rpc.execution import to_execution
from trocar_server.rpc.fields import invalid
from trocar_server.rpc.replies import Parts, framed, reply_head, values_of

DIGEST_BYTES = 32
_ELSEWHERE_BYTES = 1 << 20
"""What takes over a millisecond or so, hashing and copying of more than this, stays off the event loop."""

# Appended to a kept head: two messages one after the other are merged, so this is all that a hit changes.
_HIT = pb.ExtractResponse(
    timing=pb.ServerTiming(), execution=ExecutionReport(is_cached=True)
).SerializeToString()
_HIT_IN_SHARED_MEMORY = _HIT + pb.ExtractResponse(is_shared=True).SerializeToString()


@dataclass(frozen=True)
class Question:
    """What is asked of which weights, but for the payloads."""

    owner: str
    """The principal; see Note: [Nobody sees another's entries]."""
    model_id: str
    version: str
    """Of the model's weights, never the same again."""
    digest: bytes
    """Of everything in the request that decides on the answer."""


@dataclass(frozen=True)
class Key:
    """A question with its payloads."""

    question: Question
    digest: bytes


class CachedReplies:
    """Finds and keeps replies.

    Args:
        engine: Has the cache, and knows what may be kept.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cache = engine.replies

    def question(
        self, principal: str, request: pb.ExtractRequest, stored: Mapping[str, StoredList]
    ) -> Question | None:
        """Return what the first message of a call asks; None where its answer is neither looked up nor kept.

        Raises:
            ServiceError: `UNKNOWN_MODEL` or `MODEL_NOT_LOADED`; `INVALID_ARGUMENT` for a wrong `execution`.
        """
        is_welcome = to_execution(request.execution).cache
        if not (self._cache.max_bytes and is_welcome and request.model_id):
            return None
        version = self._engine.repeatable_version(request.model_id)
        if version is None:
            return None
        return Question(principal, request.model_id, version, _digest_of_request(request, stored))

    def find(self, key: Key | None) -> KeptReply | None:
        """Return what was answered before."""
        return None if key is None else self._cache.get(key.question.owner, key.digest)

    def find_digest(
        self, question: Question | None, request: pb.ExtractRequest, *, has_payloads: bool
    ) -> KeptReply:
        """Return what was answered to a call that brings a digest in place of its payloads.

        Raises:
            ServiceError: `NOT_CACHED`, or `INVALID_ARGUMENT` for what is no such call.
        """
        if has_payloads:
            raise invalid("payload_digest", "goes with a call without payloads; send one or the other")
        if len(request.payload_digest) != DIGEST_BYTES:
            raise invalid(
                "payload_digest", f"{len(request.payload_digest)} bytes; SHA-256 has {DIGEST_BYTES}"
            )
        kept = self.find(None if question is None else _key(question, request.payload_digest))
        if kept is None:
            raise ServiceError(
                ErrorReason.NOT_CACHED,
                "no reply is kept for this digest; send the call with its payloads",
            )
        return kept

    async def keep(self, key: Key | None, plan: Plan, extraction: Extraction) -> None:
        """Keep a reply, unless another pass could have another outcome or the model has gone meanwhile."""
        if key is None or extraction.has_drawn:
            return
        head = reply_head(plan, extraction)
        head.ClearField("timing")
        reply = KeptReply(
            key.question.version,
            head.SerializeToString(),
            tuple(values_of(extraction.feature_maps)),
            plan.model_id,
            row_count(plan.inputs),
        )
        if not self._cache.has_room_for(reply):
            return
        reply = await _with_own_memory(reply)
        try:
            is_current = self._engine.repeatable_version(key.question.model_id) == reply.version
        except ServiceError:
            return
        if is_current:
            self._cache.put(key.question.owner, key.digest, reply)


def kept_messages(kept: KeptReply, most_chunk_bytes: int, *, is_shared: bool = False) -> Iterator[Parts]:
    """Yield the messages of a reply that was kept.

    Args:
        kept: The reply.
        most_chunk_bytes: The most payload bytes in one message.
        is_shared: Whether the values lie in shared memory, so that none follow.
    """
    if is_shared:
        return framed(kept.head + _HIT_IN_SHARED_MEMORY, (), most_chunk_bytes)
    return framed(kept.head + _HIT, kept.payloads, most_chunk_bytes)


async def key_of(question: Question | None, payloads: Sequence[Payload]) -> Key | None:
    """Return a question with its payloads, by what has come and not by what the caller says of it."""
    if question is None:
        return None
    if sum(payload.nbytes for payload in payloads) > _ELSEWHERE_BYTES:
        return _key(question, await asyncio.to_thread(_digest_of_payloads, payloads))
    return _key(question, _digest_of_payloads(payloads))


def _key(question: Question, payload_digest: bytes) -> Key:
    return Key(question, hashlib.sha256(question.digest + payload_digest).digest())


def _digest_of_payloads(payloads: Sequence[Payload]) -> bytes:
    digest = hashlib.sha256()
    for payload in payloads:
        digest.update(payload.data)
    return digest.digest()


def _digest_of_request(request: pb.ExtractRequest, stored: Mapping[str, StoredList]) -> bytes:
    """Return the digest of what decides on the answer: all but how it travels and when it is computed."""
    asked = pb.ExtractRequest()
    asked.CopyFrom(request)
    asked.ClearField("max_chunk_bytes")
    asked.ClearField("payload_digest")
    asked.ClearField("shared_payload")
    asked.ClearField("shared_reply")
    asked.execution.ClearField("cache")
    asked.execution.ClearField("priority")
    parts = [asked.SerializeToString(deterministic=True), *(stored[name].digest for name in sorted(stored))]
    return hashlib.sha256(b"".join(parts)).digest()


async def _with_own_memory(reply: KeptReply) -> KeptReply:
    """Copy the payloads: a model may go on to write to what it has returned, a weight for example."""

    def copies() -> tuple[memoryview, ...]:
        return tuple(np.array(payload).data.toreadonly() for payload in reply.payloads)

    large = reply.byte_count > _ELSEWHERE_BYTES
    return replace(reply, payloads=await asyncio.to_thread(copies) if large else copies())
