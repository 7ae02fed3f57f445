"""`ExtractionService`: check, receive, run, stream."""

from collections.abc import AsyncIterator, Sequence

import grpc

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.wire import Chunk
from trocar_server.engine.admission import MethodClass, Reservation
from trocar_server.engine.engine import Engine
from trocar_server.engine.plan import Payload, row_count
from trocar_server.engine.reply_cache import KeptReply
from trocar_server.errors import ServiceError
from trocar_server.models import current_flow
from trocar_server.rpc.cached_replies import CachedReplies, kept_messages, key_of
from trocar_server.rpc.compression import compress_if_asked
from trocar_server.rpc.constants import check_constants, constants_of
from trocar_server.rpc.known_requests import KnownRequest, KnownRequests
from trocar_server.rpc.messages import deadline_of, read_message
from trocar_server.rpc.payloads import PayloadReceiver
from trocar_server.rpc.principal import principal_of
from trocar_server.rpc.replies import (
    Parts,
    describe_output,
    edit_expansions,
    expansions,
    join_parts,
    reply_messages,
    values_of,
)
from trocar_server.rpc.requests import chunk_bytes, to_plan
from trocar_server.rpc.sending import send
from trocar_server.rpc.shared_payloads import SharedPayloads, shared_payloads
from trocar_server.rpc.splitting import split_payloads
from trocar_server.rpc.stored_lists import StoredLists
from trocar_server.shared_memory import Lender
from trocar_server.telemetry import note_hit, note_model, note_pass, phase

_SERVICE = "trocar_api.v1.ExtractionService"


class ExtractionService:
    """Runs hosted models for callers of `ExtractionService`."""

    def __init__(self, engine: Engine, lists: StoredLists, lender: Lender | None = None) -> None:
        self._engine = engine
        self._lists = lists
        self._lender = lender
        self._replies = CachedReplies(engine)
        self._requests = KnownRequests()

    async def extract(
        self, requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, Parts]"
    ) -> None:
        """Check, receive, run one pass, stream; the replica is free before the first byte goes out."""
        compress_if_asked(context)
        deadline = deadline_of(context)
        with phase("receive"):
            first = await anext(requests, None)
        if first is None:
            raise ServiceError(ErrorReason.INVALID_ARGUMENT, "the call has no message")
        known, chunks = self._requests.read(first)
        request = known.message
        note_model(request.model_id)
        if request.payload_digest:
            await self._answer_digest(request, chunks, context)
            return
        kind = MethodClass.GRADIENTS if request.HasField("objective") else MethodClass.EXTRACT
        with self._engine.admission.admit(kind, current_flow()) as held:
            await self._extract(known, chunks, requests, context, held, deadline)

    async def _extract(
        self,
        known: KnownRequest,
        chunks: Sequence[Chunk],
        requests: AsyncIterator[bytes],
        context: "grpc.aio.ServicerContext[bytes, Parts]",
        held: Reservation,
        deadline: float | None,
    ) -> None:
        request, principal = known.message, principal_of(context)
        with shared_payloads(self._lender, principal, request) as shared:
            stored = await self._lists.find(principal, request.model_id, request.edits)
            plan, byte_counts = known.plan(self._engine.limits, stored)
            rows = row_count(plan.inputs)
            held.reserve(sum(byte_counts), rows)
            with phase("check"):
                expected_bytes = await self._engine.checks.check(plan, deadline)
            held.reserve(expected_bytes, rows)
            held.expect(self._engine.expected_s(plan, deadline))
            with phase("receive"):
                if shared.has_payload:
                    received = await shared.payloads(byte_counts, chunks)
                else:
                    received = await _received(requests, byte_counts, chunks)
            key = await key_of(self._replies.question(principal, request, stored), received)
            kept = self._replies.find(key)
            if kept is not None:
                await self._send_kept(kept, plan.max_chunk_bytes, shared, context)
                return
            payloads = split_payloads(plan, received, stored)
            await check_constants(constants_of(plan, payloads))
            with phase("prepare"):
                prepared = await self._engine.prepare(plan, payloads)
            extraction = await self._engine.extract(prepared, deadline)
            note_pass(plan, extraction)
            del received, payloads, prepared, chunks, stored
            await self._replies.keep(key, plan, extraction)
            values = values_of(extraction.feature_maps)
            held.computed()
            held.add(sum(value.nbytes for value in values) - held.byte_count)
            is_shared = await shared.place(values)
        with phase("reply"):
            messages = reply_messages(plan, extraction, known.reply, is_shared=is_shared)
            await send(context, messages, self._engine.limits.stall_timeout_s)

    async def _answer_digest(
        self,
        request: pb.ExtractRequest,
        chunks: Sequence[Chunk],
        context: "grpc.aio.ServicerContext[bytes, Parts]",
    ) -> None:
        """Answer from the feature cache: nothing waits for a replica or for the thread that owns torch."""
        principal = principal_of(context)
        with shared_payloads(self._lender, principal, request) as shared:
            stored = await self._lists.find(principal, request.model_id, request.edits)
            question = self._replies.question(principal, request, stored)
            has_payloads = bool(chunks) or shared.has_payload
            kept = self._replies.find_digest(question, request, has_payloads=has_payloads)
            most_bytes = chunk_bytes(request, self._engine.limits)
            await self._send_kept(kept, most_bytes, shared, context)

    async def _send_kept(
        self,
        kept: KeptReply,
        most_chunk_bytes: int,
        shared: SharedPayloads,
        context: "grpc.aio.ServicerContext[bytes, Parts]",
    ) -> None:
        note_hit(kept.model_id, kept.row_count)
        is_shared = await shared.place(kept.payloads)
        with phase("reply"):
            messages = kept_messages(kept, most_chunk_bytes, is_shared=is_shared)
            await send(context, messages, self._engine.limits.stall_timeout_s)

    async def plan(self, message: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        """Check a request and describe its reply."""
        request, _ = read_message(pb.PlanRequest, message)
        wanted = request.extraction
        note_model(wanted.model_id)
        stored = await self._lists.find(principal_of(context), wanted.model_id, wanted.edits)
        plan, byte_counts = to_plan(wanted, self._engine.limits, stored, needs_inputs=False)
        preview = await self._engine.checks.preview(plan, deadline_of(context))
        response = pb.PlanResponse(
            feature_maps=map(describe_output, preview.outputs),
            expansions=expansions(plan, preview.expansions),
            stopped_at=preview.stopped_at,
            reply_byte_count=sum(output.byte_count for output in preview.outputs),
            request_byte_count=sum(byte_counts),
            memory_byte_count=preview.memory_bytes,
            is_symbolic=preview.is_symbolic,
            edit_expansions=edit_expansions(preview.edit_expansions),
        )
        return response.SerializeToString()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler with our own chunk codec in place of protobuf's copies."""
        method: grpc.RpcMethodHandler[bytes, Parts] = grpc.stream_stream_rpc_method_handler(
            self.extract, request_deserializer=None, response_serializer=join_parts
        )
        plan: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(self.plan)
        return grpc.method_handlers_generic_handler(_SERVICE, {"Extract": method, "Plan": plan})


async def _received(
    requests: AsyncIterator[bytes], byte_counts: Sequence[int], chunks: Sequence[Chunk]
) -> list[Payload]:
    """Return the payloads of a call, put together from the chunks of its messages."""
    receiver = PayloadReceiver(byte_counts)
    receiver.feed(chunks)
    while not receiver.is_complete:
        message = await anext(requests, None)
        if message is None:
            break
        receiver.feed(read_message(pb.ExtractRequest, message)[1])
    return receiver.finish()
