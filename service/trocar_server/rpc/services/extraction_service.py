"""`ExtractionService`: parse, call the engine, send."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice

import grpc

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.wire import HEAD_KEY, Chunk
from trocar_server.caller import ANONYMOUS
from trocar_server.config import Limits
from trocar_server.engine.engine import Engine
from trocar_server.engine.reply_cache import KeptReply
from trocar_server.engine.request.payload_layout import split_payloads
from trocar_server.engine.request.plan import Payload, Plan
from trocar_server.engine.run.call import Call, Keeping
from trocar_server.engine.schedule.admission import Reservation
from trocar_server.errors import ServiceError
from trocar_server.models import current_flow, current_principal
from trocar_server.rpc.call.principal import principal_of
from trocar_server.rpc.codec.edits import NO_LISTS, StoredList, tensors_of
from trocar_server.rpc.codec.extract_requests import chunk_bytes, to_plan
from trocar_server.rpc.codec.fields import invalid
from trocar_server.rpc.codec.replies import (
    Parts,
    join_parts,
    kept_head,
    plan_response,
    reply_messages,
)
from trocar_server.rpc.codec.stored.stored_lists import StoredLists
from trocar_server.rpc.listen.registration import Handler
from trocar_server.rpc.services.adapters import with_adapter
from trocar_server.rpc.transfer.messages import (
    Arrivals,
    CallContext,
    are_whole,
    compress_if_asked,
    deadline_of,
    read_message,
    receive,
    send,
    whole_payloads,
)
from trocar_server.rpc.transfer.plan_cache import PlanCache, PlannedRequest
from trocar_server.rpc.transfer.plan_values import plan_values
from trocar_server.rpc.transfer.reply_lookup import kept_messages, kept_reply, question_of
from trocar_server.rpc.transfer.shared_payloads import NOT_SHARED, SharedPayloads, shared_payloads
from trocar_server.shared_memory import Lender
from trocar_server.telemetry import note_hit, note_model, note_pass, pass_facts, phase
from trocar_server.training.trainers import Trainers


async def _no_messages() -> AsyncIterator[bytes]:
    """Yield nothing: a prepared call has no messages."""
    return
    yield


_NO_ARRIVALS = Arrivals(_no_messages(), Limits(), len)


@dataclass(frozen=True)
class _Asked:
    """A call whose first message was read."""

    planned: PlannedRequest
    chunks: Sequence[Chunk]
    sizes: Sequence[int] | None
    """Bytes of the payloads, where it is known that each is one chunk."""
    arrivals: Arrivals[bytes]
    principal: str
    deadline: float | None
    lent: SharedPayloads | None = None
    """Memory of a prepared call, instead of what its message names."""


def _receiving(
    asked: _Asked, shared: SharedPayloads, byte_counts: Sequence[int]
) -> tuple[Callable[[Reservation], Awaitable[list[Payload]]], Callable[[], list[Payload]] | None]:
    """Return what receives the payloads of a call, and what copies them where all have come; None if not."""
    if shared.has_payload:
        receiving = partial(shared.receive, byte_counts, asked.chunks)
        return receiving, None if asked.chunks else shared.arrived(byte_counts)
    is_whole = asked.sizes == byte_counts or are_whole(byte_counts, asked.chunks)
    arrived = partial(whole_payloads, asked.chunks) if is_whole else None
    return partial(receive, asked.arrivals, byte_counts, asked.chunks, _chunks), arrived


class ExtractionService:
    """Runs hosted models for callers of `ExtractionService`."""

    def __init__(
        self,
        engine: Engine,
        lists: StoredLists,
        lender: Lender | None = None,
        trainers: Trainers | None = None,
    ) -> None:
        self._engine = engine
        self._trainers = trainers
        self._lists = lists
        self._lender = lender
        self._plans = PlanCache()

    async def extract(self, requests: AsyncIterator[bytes], context: CallContext) -> None:
        """Run one pass; its replica is free before the first byte is sent."""
        compress_if_asked(context)
        if not self._engine.admission.is_idle:
            self._check_before_reading(context)
        asked = await self._read(requests, context)
        answer = self._kept if asked.planned.message.payload_digest else self._answer
        with self._engine.admission.admit(asked.planned.kind, current_flow()) as reservation:
            messages = await answer(asked, reservation)
            del asked  # the chunks of its first message
            with phase("reply"):
                await send(context, messages, self._engine.limits.stall_timeout_s)

    def _check_before_reading(self, context: CallContext) -> None:
        """Refuse a call that does not fit now by the copy of its head in the metadata, if it came before.

        Every check is made again on the call itself, so a false copy spares a caller nothing.
        """
        engine = self._engine
        head = dict(context.invocation_metadata() or ()).get(HEAD_KEY)
        planned = self._plans.find(head) if isinstance(head, bytes) else None
        if planned is None or planned.key is None or not planned.is_plain:
            return
        note_model(planned.message.model_id)
        plan, byte_counts = planned.plan(engine.limits, NO_LISTS)
        if not engine.needs_processing(plan):
            with engine.admission.admit(planned.kind, current_flow()) as reservation:
                engine.check_known(plan, planned.key, sum(byte_counts), deadline_of(context), reservation)

    async def _read(self, requests: AsyncIterator[bytes], context: CallContext) -> _Asked:
        """Read the first message of a call."""
        deadline, arrivals = deadline_of(context), Arrivals(requests, self._engine.limits, len)
        with phase("receive"):
            first = await arrivals.next()
        if first is None:
            raise ServiceError(ErrorReason.INVALID_ARGUMENT, "the call has no message")
        planned, chunks, sizes = self._plans.read(first)
        principal = current_principal() or principal_of(context)
        if planned.message.adapter:
            planned = await self._adapted(planned, principal)
        note_model(planned.message.model_id)
        return _Asked(planned, chunks, sizes, arrivals, principal, deadline)

    async def _adapted(self, planned: PlannedRequest, principal: str) -> PlannedRequest:
        """Return a request with the adapter that it names."""
        return PlannedRequest(await with_adapter(self._trainers, planned.message, principal), planned.key)

    async def prepared(self, head: bytes, principal: str) -> tuple[PlannedRequest, int]:
        """Check a request whose payloads come later, and return it with the bytes of these.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, and whatever is wrong with the request.
        """
        planned, chunks, _ = self._plans.read(head)
        message = planned.message
        if chunks or planned.shares_memory or message.payload_digest:
            raise invalid("request", "has payloads, or the place of payloads")
        adapted = await self._adapted(planned, principal) if message.adapter else planned
        stored = await self._lists.find(
            principal, adapted.message.model_id, adapted.message.edits, adapted.message.taps
        )
        plan, byte_counts = adapted.plan(self._engine.limits, stored)
        self._engine.deployment(plan.model_id)
        return planned, sum(byte_counts)

    async def answer_prepared(
        self, planned: PlannedRequest, lent: SharedPayloads, deadline: float
    ) -> bytes | None:
        """Run a prepared call; return its reply but for the values in shared memory, None if these lack room.

        Args:
            planned: The request.
            lent: Where its payloads are, and where the values of its reply belong.
            deadline: A time of `time.monotonic()` in seconds.
        """
        principal = current_principal() or ANONYMOUS
        note_model(planned.message.model_id)
        if planned.message.adapter:
            planned = await self._adapted(planned, principal)
        asked = _Asked(planned, (), None, _NO_ARRIVALS, principal, deadline, lent)
        with self._engine.admission.admit(planned.kind, current_flow()) as reservation:
            messages = await self._answer(asked, reservation)
        only = list(islice(messages, 2))
        return bytes(only[0][0]) if len(only) == 1 == len(only[0]) else None

    async def _answer(self, asked: _Asked, reservation: Reservation) -> Iterable[Parts]:
        """Run a call, and return the messages of its reply."""
        engine, planned, principal = self._engine, asked.planned, asked.principal
        request, stored = planned.message, NO_LISTS
        borrowed: AbstractContextManager[SharedPayloads] = nullcontext(asked.lent or NOT_SHARED)
        if planned.shares_memory:
            borrowed = shared_payloads(self._lender, principal, request)
        with borrowed as shared:
            if planned.has_stored:
                stored = await self._lists.find(principal, request.model_id, request.edits, request.taps)
            plan, byte_counts = planned.plan(engine.limits, stored)
            receiving, arrived = _receiving(asked, shared, byte_counts)
            call = Call(
                plan,
                sum(byte_counts),
                receiving,
                phase,
                asked.deadline,
                planned.key,
                tensors_of(stored) if stored else {},
                self._keeping(asked, plan, stored) if engine.replies.max_bytes else None,
                arrived,
            )
            answer = await engine.serve(call, reservation)
            if isinstance(answer, KeptReply):
                return await _kept_messages(answer, plan.max_chunk_bytes, shared)
            note_pass(pass_facts(plan, answer))
            is_shared = shared.has_reply and await shared.place(answer.payloads)
        return reply_messages(plan, answer, planned.reply, is_shared=is_shared)

    def _keeping(self, asked: _Asked, plan: Plan, stored: Mapping[str, StoredList]) -> Keeping | None:
        question = question_of(self._engine, asked.principal, asked.planned.message, stored)
        return None if question is None else Keeping(question, partial(kept_head, plan))

    async def _kept(self, asked: _Asked, reservation: Reservation) -> Iterable[Parts]:
        """Answer from the reply cache, without a replica and without the thread that owns torch."""
        engine, request, principal = self._engine, asked.planned.message, asked.principal
        with shared_payloads(self._lender, principal, request) as shared:
            stored = await self._lists.find(principal, request.model_id, request.edits, request.taps)
            question = question_of(engine, principal, request, stored)
            has_payloads = bool(asked.chunks) or shared.has_payload
            kept = kept_reply(engine, question, request, has_payloads=has_payloads)
            reservation.reserve(kept.byte_count, kept.row_count)
            return await _kept_messages(kept, chunk_bytes(request, engine.limits), shared)

    async def plan(self, message: bytes, context: CallContext) -> bytes:
        """Check a request and describe its reply."""
        request, _ = read_message(pb.PlanRequest, message)
        wanted = await with_adapter(self._trainers, request.extraction, principal_of(context))
        note_model(wanted.model_id)
        stored = await self._lists.find(principal_of(context), wanted.model_id, wanted.edits, wanted.taps)
        plan, byte_counts = to_plan(wanted, self._engine.limits, stored, needs_inputs=False)
        payloads: Mapping[str, Payload] = plan_values(wanted.chunks, plan, byte_counts)
        if self._engine.needs_processing(plan):
            plan, made = await self._processed(plan, stored, deadline_of(context))
            payloads = {**payloads, **made}
        preview = await self._engine.checks.preview(plan, deadline_of(context), payloads)
        return plan_response(plan, preview, sum(byte_counts)).SerializeToString()

    async def _processed(
        self, plan: Plan, stored: Mapping[str, StoredList], deadline: float | None
    ) -> tuple[Plan, Mapping[str, Payload]]:
        """Return a plan with the arguments that its texts and images become, and these by name."""
        if plan.has_sound:
            raise invalid("extraction.inputs", "a dry run takes no sound; send the shapes of its features")
        payloads = split_payloads(plan, [], tensors_of(stored))
        plan, processed = await self._engine.process_inputs(plan, payloads, deadline)
        names = [name for made in plan.processed for name in made.arguments]
        return plan, dict(zip(names, processed.inputs, strict=False))  # images alone are not described

    def own_handlers(self) -> dict[str, Handler]:
        """Handlers with our own chunk codec in place of protobuf's copies."""
        extract: Handler = grpc.stream_stream_rpc_method_handler(
            self.extract, request_deserializer=None, response_serializer=join_parts
        )
        return {"Extract": extract, "Plan": grpc.unary_unary_rpc_method_handler(self.plan)}


async def _kept_messages(kept: KeptReply, most_chunk_bytes: int, shared: SharedPayloads) -> Iterable[Parts]:
    note_hit(kept.model_id, kept.row_count)
    is_shared = await shared.place(kept.payloads)
    return kept_messages(kept, most_chunk_bytes, is_shared=is_shared)


def _chunks(message: bytes) -> list[Chunk]:
    return read_message(pb.ExtractRequest, message)[1]
