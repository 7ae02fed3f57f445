"""Reply cache lookup: cache keys of requests, and the messages of cached replies.

question = question_of(engine, principal, request, stored)
kept = kept_reply(engine, question, request, has_payloads=False)
"""

import hashlib
from collections.abc import Iterable, Mapping

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1.execution_pb2 import ExecutionReport
from trocar_server.engine.engine import Engine
from trocar_server.engine.reply_cache import KeptReply, Question
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.edits import StoredList
from trocar_server.rpc.codec.execution import to_execution
from trocar_server.rpc.codec.fields import invalid
from trocar_server.rpc.codec.replies import Parts, framed

DIGEST_BYTES = 32

# Appended to a cached head: concatenated messages are merged, so this is all that a hit changes.
_HIT = pb.ExtractResponse(
    timing=pb.ServerTiming(), execution=ExecutionReport(is_cached=True)
).SerializeToString()
_HIT_IN_SHARED_MEMORY = _HIT + pb.ExtractResponse(is_shared=True).SerializeToString()


def question_of(
    engine: Engine, principal: str, request: pb.ExtractRequest, stored: Mapping[str, StoredList]
) -> Question | None:
    """Question of a call's first message; None if its reply is neither looked up nor cached.

    Raises:
        ServiceError: `UNKNOWN_MODEL` or `MODEL_NOT_LOADED`; `INVALID_ARGUMENT` for a wrong `execution`.
    """
    if not (engine.replies.max_bytes and to_execution(request.execution).cache and request.model_id):
        return None
    version = engine.deployment(request.model_id).reply_version
    if version is None:
        return None
    return Question(principal, request.model_id, version, _digest_of_request(request, stored))


def kept_reply(
    engine: Engine, question: Question | None, request: pb.ExtractRequest, *, has_payloads: bool
) -> KeptReply:
    """Cached reply to a call that sends a digest instead of its payloads.

    Raises:
        ServiceError: `NOT_CACHED`, or `INVALID_ARGUMENT` for other calls.
    """
    if has_payloads:
        raise invalid("payload_digest", "goes with a call without payloads; send one or the other")
    if len(request.payload_digest) != DIGEST_BYTES:
        raise invalid("payload_digest", f"{len(request.payload_digest)} bytes; SHA-256 has {DIGEST_BYTES}")
    key = None if question is None else question.key(request.payload_digest)
    kept = None if key is None else engine.replies.get(key.question.owner, key.digest)
    if kept is None:
        raise ServiceError(
            ErrorReason.NOT_CACHED,
            "no reply is stored for this digest; send the call with its payloads",
        )
    return kept


def kept_messages(kept: KeptReply, most_chunk_bytes: int, *, is_shared: bool = False) -> Iterable[Parts]:
    """Yield the messages of a cached reply.

    Args:
        kept: The reply.
        most_chunk_bytes: Maximum payload bytes in one message.
        is_shared: Whether the values are in shared memory, so that no chunks follow.
    """
    if is_shared:
        return framed(kept.head + _HIT_IN_SHARED_MEMORY, (), most_chunk_bytes)
    return framed(kept.head + _HIT, kept.payloads, most_chunk_bytes)


def _digest_of_request(request: pb.ExtractRequest, stored: Mapping[str, StoredList]) -> bytes:
    """Digest of the fields that determine the answer: all but transfer and scheduling."""
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
