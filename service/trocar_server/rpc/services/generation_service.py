"""`GenerationService`: texts that follow prompts, a message for each pass."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial

import grpc

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import generation_pb2 as pb
from trocar_api.v1.extraction_pb2 import FeatureMap as FeatureMapMessage
from trocar_api.wire import Chunk
from trocar_server.engine.engine import Engine
from trocar_server.engine.generate.decoding import DecodedPass
from trocar_server.engine.generate.generation import Continuation, Generation
from trocar_server.engine.generate.joining import Joined, joined
from trocar_server.engine.generate.prompts import errors_of_prompt, split_prompts
from trocar_server.engine.generate.sampling import Sampling
from trocar_server.engine.generate.steps import End
from trocar_server.engine.generate.text_pieces import Decode, TextPieces, prompt_pieces
from trocar_server.engine.request.payload_layout import split_payloads
from trocar_server.engine.request.plan import Payloads, Plan
from trocar_server.engine.run.pass_result import FeatureMap
from trocar_server.engine.schedule.admission import MethodClass, Reservation
from trocar_server.engine.schedule.deadlines import until
from trocar_server.engine.schedule.room import Room
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, current_flow
from trocar_server.models.huggingface.causal import CausalModel
from trocar_server.rpc.call.principal import principal_of
from trocar_server.rpc.codec.edits import tensors_of
from trocar_server.rpc.codec.extract_requests import to_plan
from trocar_server.rpc.codec.generation import (
    gates_of,
    sampling_from_wire,
    sequence_to_wire,
    started_to_wire,
    token_to_wire,
)
from trocar_server.rpc.codec.replies import Parts, describe, framed, join_parts, values_of
from trocar_server.rpc.codec.stored.stored_lists import StoredLists
from trocar_server.rpc.listen.registration import Handler
from trocar_server.rpc.services.adapters import with_adapter
from trocar_server.rpc.transfer.backlog import Backlog
from trocar_server.rpc.transfer.messages import (
    Arrivals,
    CallContext,
    compress_if_asked,
    deadline_of,
    read_message,
    receive,
    send,
)
from trocar_server.telemetry import PassFacts, note_model, note_pass, phase
from trocar_server.training.trainers import Trainers


class GenerationService:
    """Generates text for callers of `GenerationService`."""

    def __init__(self, engine: Engine, lists: StoredLists, trainers: Trainers | None = None) -> None:
        self._engine = engine
        self._lists = lists
        self._trainers = trainers

    async def generate(self, requests: AsyncIterator[bytes], context: CallContext) -> None:
        """Generate the texts of the prompts, one after the other; the replica is free between two passes."""
        compress_if_asked(context)
        stall_s = self._engine.limits.stall_timeout_s
        with self._engine.admission.admit(MethodClass.STREAM, current_flow()) as reservation:
            async with AsyncExitStack() as held:
                generation, plan = await self._start(requests, context, reservation, held)
                texts = await prompt_pieces(self._decoder(generation.hosted), generation.started.prompts)
                taps = [tap.selector.text for tap in plan.taps]
                started = started_to_wire(generation.started, taps, texts)
                await send(context, _alone(pb.GenerateResponse(started=started)), stall_s)
                backlog = Backlog(reservation)
                made = self._messages(generation, plan.max_chunk_bytes, backlog, held)
                async with aclosing(backlog.messages(made)) as messages:
                    async for parts in messages:
                        with phase("reply"):
                            await send(context, parts, stall_s)

    async def _start(
        self,
        requests: AsyncIterator[bytes],
        context: CallContext,
        reservation: Reservation,
        held: AsyncExitStack,
    ) -> tuple[Generation, Plan]:
        """Receive and check a run.

        Args:
            requests: The messages of the call.
            context: Of the call.
            reservation: Of the call.
            held: Gets what the run holds while it computes: weights that do not change, and memory.
        """
        engine, deadline = self._engine, deadline_of(context)
        sampling, plan, payloads = await self._received(requests, context, reservation)
        prompts = split_prompts(plan, payloads, sampling.sample_count)
        if engine.needs_processing(plan):
            room, count = Room(reservation), len(prompts)
            for index, prompt in enumerate(prompts):
                with errors_of_prompt(index, count):
                    prompts[index] = await engine.process_inputs(*prompt, deadline, room)
        trainer = self._trainers.serving(plan.model_id) if self._trainers is not None else None
        if trainer is not None:
            async with until(deadline, "the trainer's step ended"):
                await held.enter_async_context(trainer.unchanged())
        with phase("check"):
            generation = await engine.start_generation(prompts, sampling, deadline)
        held.enter_context(generation.pool.run())
        reservation.expect(generation.step_s)
        held.callback(reservation.computed)
        reservation.reserve(generation.started.cache_bytes)
        held.callback(reservation.add, -generation.started.cache_bytes)
        return generation, plan

    async def _received(
        self, requests: AsyncIterator[bytes], context: CallContext, reservation: Reservation
    ) -> tuple[Sampling, Plan, Payloads]:
        engine, principal = self._engine, principal_of(context)
        arrivals = Arrivals(requests, engine.limits, len)
        with phase("receive"):
            first = await arrivals.next()
        if first is None:
            raise ServiceError(ErrorReason.INVALID_ARGUMENT, "the call has no message")
        message, chunks = read_message(pb.GenerateRequest, first)
        request = await with_adapter(self._trainers, message.extraction, principal)
        note_model(request.model_id)
        gates = gates_of(message.options)
        stored = await self._lists.find(principal, request.model_id, request.edits, request.taps, gates)
        sampling = sampling_from_wire(message.options, stored)
        plan, byte_counts = to_plan(request, engine.limits, stored, needs_taps=False)
        CausalModel.of(engine.deployment(plan.model_id).hosted)  # before its tokenizer is looked for
        reservation.check(sum(byte_counts), 1)
        with phase("receive"):
            received = await receive(arrivals, byte_counts, chunks, _chunks, reservation)
        return sampling, plan, split_payloads(plan, received, tensors_of(stored))

    async def _messages(
        self, generation: Generation, chunk_bytes: int, backlog: Backlog, held: AsyncExitStack
    ) -> AsyncGenerator[list[Parts], None]:
        finished = pb.GenerationFinished()
        async with held:  # until all is computed, or fails: how fast the caller reads does not matter
            for continuation in generation.continuations():
                backlog.begin()
                async with aclosing(self._of_sequence(generation, continuation, chunk_bytes)) as messages:
                    async for parts in messages:
                        yield parts
                finished.pass_count += continuation.pass_count
                finished.compute_s += continuation.compute_s
                finished.queue_s += continuation.queue_s
        yield _alone(pb.GenerateResponse(finished=finished))

    def _decoder(self, hosted: HostedModel) -> Decode:
        return partial(self._engine.preparation.processor.texts, hosted, limits=self._engine.limits)

    async def _of_sequence(
        self, generation: Generation, continuation: Continuation, chunk_bytes: int
    ) -> AsyncGenerator[list[Parts], None]:
        hosted = generation.hosted
        pieces = TextPieces(self._decoder(hosted), continuation.prompt_ids, generation.started.sampling.stop)
        model_id = hosted.spec.model_id
        ended_at: float | None = None
        async with aclosing(continuation.passes()) as passes:
            async for steps in passes:
                for step in steps:
                    token_s = None if ended_at is None else step.ended_at - ended_at
                    compute_s, ended_at = step.decoded.compute_s, step.ended_at
                    facts = PassFacts(model_id, 1, step.queue_s, compute_s, token_count=1, token_s=token_s)
                    note_pass(facts)
                decoded = [step.decoded for step in steps]
                for message in await self._messages_of(hosted, continuation, decoded, pieces, chunk_bytes):
                    yield message
        rest = await pieces.rest()
        if pieces.has_stopped:
            continuation.end = End.STOP_STRING
        yield _alone(pb.GenerateResponse(sequence=sequence_to_wire(continuation, rest)))

    async def _messages_of(
        self,
        hosted: HostedModel,
        continuation: Continuation,
        decoded: Sequence[DecodedPass],
        pieces: TextPieces,
        chunk_bytes: int,
    ) -> list[list[Parts]]:
        """Return the messages of some passes."""
        choices = [(each.choice.token_id, [other for other, _ in each.choice.likely]) for each in decoded]
        last: list[tuple[str, list[str]]] = []
        if continuation.end is End.STOP_TOKEN:
            last = [("", await pieces.alone(choices.pop()[1]))]
        texts = [*(await pieces.add_all(choices) if choices else ()), *last]
        if pieces.has_stopped:
            continuation.end = End.STOP_STRING
        tokens = [token_to_wire(continuation, each, *own) for each, own in zip(decoded, texts, strict=True)]
        messages = []
        for together in joined(decoded):
            maps = await self._engine.spelled(hosted, together.feature_maps)
            head = pb.GenerateResponse(
                tokens=tokens[: together.token_count],
                feature_maps=[_described(each, together) for each in maps],
                first_position=together.first_position,
            )
            del tokens[: together.token_count]
            messages.append(list(framed(head.SerializeToString(), values_of(maps), chunk_bytes)))
        return messages

    def own_handlers(self) -> dict[str, Handler]:
        """Handlers with our own chunk codec in place of protobuf's copies."""
        generate: Handler = grpc.stream_stream_rpc_method_handler(
            self.generate, request_deserializer=None, response_serializer=join_parts
        )
        return {"Generate": generate}


def _alone(message: pb.GenerateResponse) -> list[Parts]:
    return [[message.SerializeToString()]]


def _described(found: FeatureMap, together: Joined) -> FeatureMapMessage:
    message = describe(found)
    positions = together.positions.get(found.output.name)
    if positions is not None:
        message.token_positions.add(positions=positions)
    return message


def _chunks(message: bytes) -> list[Chunk]:
    return read_message(pb.GenerateRequest, message)[1]
