"""`StreamService`: many batches in one call, in order, with a bounded number in flight."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TypeVar

import grpc
import structlog

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import stream_pb2 as pb
from trocar_api.v1.direction_pb2 import Direction
from trocar_api.v1.execution_pb2 import Execution
from trocar_api.v1.objective_pb2 import Objective
from trocar_server.engine.engine import Engine
from trocar_server.engine.execute.operand_checks import check_operands
from trocar_server.engine.host.checked_plan import CheckedPlan
from trocar_server.engine.request.payload_layout import split_payloads
from trocar_server.engine.request.plan import Payload, Payloads, Plan
from trocar_server.engine.run.bound_call import Prepared
from trocar_server.engine.run.extraction import Extraction
from trocar_server.engine.run.stream_statistics import MAX_CHECKPOINT_BYTES, StreamStatistics
from trocar_server.engine.schedule.admission import MethodClass, Reservation
from trocar_server.engine.schedule.room import Room
from trocar_server.errors import ServiceError
from trocar_server.models import current_flow
from trocar_server.rpc.call.principal import principal_of
from trocar_server.rpc.codec.edits import StoredList, tensors_of
from trocar_server.rpc.codec.extract_requests import base_plan, plan_operand_bytes, stored_bytes
from trocar_server.rpc.codec.fields import invalid
from trocar_server.rpc.codec.inputs import check_request_bytes
from trocar_server.rpc.codec.replies import Parts, describe, framed, join_parts, reply_head, values_of
from trocar_server.rpc.codec.stored.stored_lists import StoredLists
from trocar_server.rpc.codec.text import sendable
from trocar_server.rpc.listen.registration import Handler
from trocar_server.rpc.services.adapters import with_adapter
from trocar_server.rpc.services.direction_fitting import (
    DirectionFits,
    DirectionFitting,
    check_start,
    fit_plan,
)
from trocar_server.rpc.transfer.messages import CallContext, compress_if_asked, send
from trocar_server.rpc.transfer.prefetch import prefetch
from trocar_server.rpc.transfer.stored_batches import StoredBatches
from trocar_server.rpc.transfer.stream_batches import StreamBatch, StreamReader
from trocar_server.telemetry import note_model, note_pass, pass_facts, phase
from trocar_server.training.datasets import DatasetLibrary
from trocar_server.training.trainers import Trainers

Result = TypeVar("Result")

_BUSY_PAUSE_S = 0.1
_CHECKPOINT_INTERVAL, _MAX_CHECKPOINT_INTERVAL = 16, 1024
_log = structlog.get_logger("trocar")


@dataclass
class _ReadyBatch:
    """A batch with decoded images, or one that failed before."""

    index: int
    prepared: Prepared | None
    error: ServiceError | None = None
    byte_count: int = 0
    """Of its inputs, as reserved."""


@dataclass
class _Stream:
    """State common to every batch of one call."""

    plan: Plan
    first_index: int
    timeout_s: float | None
    payloads: Payloads
    """Without inputs."""
    statistics: StreamStatistics | None
    checkpoint_interval: int
    reservation: Reservation
    """Reservation for the bytes of its batches and results."""
    idle_bytes: int
    """Bytes that it keeps to its end: those of its start."""
    fitting: DirectionFitting | None = None
    """The directions that are fitted to its values, which are then not sent."""
    ready_bytes: int = 0
    """Bytes of prepared batches, and of results that are not sent yet."""

    def release(self, byte_count: int) -> None:
        """Release bytes of what was ready; reserve them if negative: results may be larger than inputs."""
        self.reservation.add(-byte_count)
        self.ready_bytes -= byte_count
        if byte_count > 0:
            self.end_repaid_overdraft()

    def end_repaid_overdraft(self) -> None:
        """Let other streams exceed the budgets, unless something ready does; see Note: [Overdraft]."""
        if not (self.ready_bytes and self.reservation.exceeded()):
            self.reservation.end_overdraft()


@dataclass
class _Result:
    """The messages that answer a batch, and the bytes that stay reserved until they are sent."""

    messages: list[Parts]
    byte_count: int


def _room(stream: _Stream, batch: StreamBatch) -> Room:
    """Return the room for what a batch becomes; see Note: [Overdraft]."""
    kept_bytes = stream.idle_bytes + batch.byte_count
    return Room(stream.reservation, kept_bytes, may_overdraw=not stream.ready_bytes)


async def _with_memory(work: Callable[[], Awaitable[Result]]) -> Result:
    """Do work, again while there is no memory for it: a stream waits for it, as it does for a replica."""
    while True:
        try:
            return await work()
        except ServiceError as error:
            if error.reason is not ErrorReason.SERVER_BUSY:
                raise
        await asyncio.sleep(_BUSY_PAUSE_S)


class StreamService:
    """Runs hosted models for callers of `StreamService`.

    Three stages run concurrently, each one batch ahead of the next: receiving and decoding, the pass,
    sending. So the model need not wait, and a call keeps a handful of batches at most: the server stops
    reading from a caller that does not read its replies.
    """

    def __init__(
        self,
        engine: Engine,
        lists: StoredLists,
        fits: DirectionFits,
        trainers: Trainers | None = None,
        datasets: DatasetLibrary | None = None,
    ) -> None:
        self._engine = engine
        self._datasets = datasets
        self._lists = lists
        self._fits = fits
        self._trainers = trainers

    async def extract_stream(self, requests: AsyncIterator[bytes], context: CallContext) -> None:
        """Answer every batch, then send an end marker."""
        compress_if_asked(context)
        with self._engine.admission.admit(MethodClass.STREAM, current_flow()) as reservation:
            reader = StreamReader(requests, self._engine.limits, reservation)
            principal = principal_of(context)
            stream = await self._start(reader, principal, reservation)
            try:
                with self._stored(reader, principal):
                    await self._answer(stream, reader, context)
            finally:
                if stream.fitting is not None:
                    await stream.fitting.close()

    async def _answer(self, stream: _Stream, reader: StreamReader, context: CallContext) -> None:
        stall_s = self._engine.limits.stall_timeout_s
        counts = StreamStatistics(()) if stream.statistics is None else stream.statistics
        ready = self._ready(stream, prefetch(reader.batches(stream.plan, stream.first_index)))
        results = self._results(stream, counts, prefetch(ready))
        async with aclosing(prefetch(results)) as messages:
            async for result in messages:
                with phase("reply"):
                    await send(context, result.messages, stall_s)
                stream.release(result.byte_count)
        directions = [] if stream.fitting is None else await stream.fitting.finish()
        await send(context, await self._engine.owner.run(lambda: _end(stream, counts, directions)), stall_s)

    @contextmanager
    def _stored(self, reader: StreamReader, principal: str) -> Iterator[None]:
        """Let batches name samples of the principal's data sets, and close their files at the end."""
        if self._datasets is None:
            yield
            return
        reader.stored = stored = StoredBatches(self._datasets, principal, self._engine.limits)
        try:
            yield
        finally:
            stored.close()

    async def _start(self, reader: StreamReader, principal: str, reservation: Reservation) -> _Stream:
        start, chunks = await reader.start()
        is_fit = start.HasField("direction_fit")
        if is_fit:
            check_start(start)
        start = await with_adapter(self._trainers, start, principal)
        note_model(start.model_id)
        stored = await self._lists.find(principal, start.model_id, start.edits, start.taps)
        plan = base_plan(start, self._engine.limits, stored)
        if is_fit:
            plan = fit_plan(plan)
        with phase("check"):
            await self._engine.checks.check_taps(plan)
        byte_counts = [*plan_operand_bytes(plan), *_checkpoint_byte_count(start)]
        check_request_bytes([*byte_counts, stored_bytes(plan)], self._engine.limits)
        reservation.check(sum(byte_counts))
        received = await reader.payloads(byte_counts, chunks)
        statistics = await self._statistics(plan, start, stored, received)
        payloads = split_payloads(plan, received, tensors_of(stored))
        await check_operands(plan, payloads)
        first_index, timeout_s, interval = _first_index(start), _timeout_s(start), _checkpoint_interval(start)
        idle_bytes = reservation.byte_count
        fitting = await self._fits.begin(start, plan, principal) if is_fit else None
        return _Stream(
            plan, first_index, timeout_s, payloads, statistics, interval, reservation, idle_bytes, fitting
        )

    async def _statistics(
        self,
        plan: Plan,
        start: pb.ExtractStreamStart,
        stored: Mapping[str, StoredList],
        received: list[Payload],
    ) -> StreamStatistics | None:
        """Return running statistics; their checkpoint, the last payload, is taken out of the others."""
        checkpoint = received.pop().tobytes() if start.checkpoint_byte_count else b""
        if not start.has_running_statistics:
            return None
        operands = received[: len(received) - len(plan.objective_operands)]  # those are labels
        deployment = self._engine.deployment(plan.model_id)
        model = await self._engine.identity(deployment)
        facts = [model.digest.encode(), _settings(start)]
        facts += [stored[name].digest for name in sorted(stored)]
        computation = await asyncio.to_thread(_digest, [*facts, *(operand.data for operand in operands)])
        return await self._engine.owner.run(lambda: StreamStatistics(plan.taps, checkpoint, computation))

    async def _ready(
        self, stream: _Stream, batches: AsyncGenerator[StreamBatch, None]
    ) -> AsyncGenerator[_ReadyBatch, None]:
        async with aclosing(batches):
            async for batch in batches:
                ready = await self._decoded(stream, batch)
                stream.ready_bytes += ready.byte_count
                stream.end_repaid_overdraft()  # of a batch that failed, or fitted in the end
                yield ready

    async def _decoded(self, stream: _Stream, batch: StreamBatch) -> _ReadyBatch:
        if batch.error is not None:
            return _ReadyBatch(batch.index, None, batch.error, batch.byte_count)
        try:
            if self._engine.needs_processing(batch.plan):
                batch = await self._processed(stream, batch)
            prepared = await self._prepared(stream, batch, await self._engine.checks.check(batch.plan))
            return _ReadyBatch(batch.index, prepared, None, batch.byte_count + prepared.made_bytes)
        except ServiceError as error:
            return _ReadyBatch(batch.index, None, error.with_traceback(None), batch.byte_count)

    async def _processed(self, stream: _Stream, batch: StreamBatch) -> StreamBatch:
        """Turn texts and sound into arguments; what they become counts as received."""
        payloads = replace(stream.payloads, inputs=batch.payloads)
        deadline = None if stream.timeout_s is None else time.monotonic() + stream.timeout_s

        async def process() -> tuple[Plan, Payloads, Room]:
            room = _room(stream, batch)
            try:
                return *await self._engine.process_inputs(batch.plan, payloads, deadline, room), room
            except BaseException:
                room.give_back()
                raise

        plan, processed, room = await _with_memory(process)
        kept_bytes = max(room.byte_count, batch.byte_count)  # what was received goes
        stream.reservation.add(kept_bytes - room.byte_count - batch.byte_count)
        batch.plan, batch.payloads, batch.byte_count = plan, processed.inputs, kept_bytes
        return batch

    async def _prepared(self, stream: _Stream, batch: StreamBatch, checked: CheckedPlan) -> Prepared:
        """Decode the images of a batch; a stream waits for memory, as it does for a replica."""
        payloads = replace(stream.payloads, inputs=batch.payloads)
        deadline = None if stream.timeout_s is None else time.monotonic() + stream.timeout_s

        def prepare() -> Awaitable[Prepared]:
            room = _room(stream, batch)
            return self._engine.preparation.prepare(checked, payloads, deadline, room)

        return await _with_memory(prepare)

    async def _results(
        self, stream: _Stream, counts: StreamStatistics, batches: AsyncGenerator[_ReadyBatch, None]
    ) -> AsyncGenerator[_Result, None]:
        async with aclosing(batches):
            async for batch in batches:
                result = pb.BatchResult(batch_index=batch.index)
                payloads = await self._fill(stream, counts, batch, result)
                done = batch.index + 1 - stream.first_index
                if stream.statistics and done % stream.checkpoint_interval == 0:
                    checkpoint = await self._engine.owner.run(stream.statistics.checkpoint)
                    result.checkpoint_byte_count = len(checkpoint)
                    payloads.append(memoryview(checkpoint))
                head = pb.ExtractStreamResponse(result=result).SerializeToString()
                byte_count = sum(payload.nbytes for payload in payloads)
                stream.release(batch.byte_count - byte_count)
                yield _Result(list(framed(head, payloads, stream.plan.max_chunk_bytes)), byte_count)

    async def _fill(
        self, stream: _Stream, counts: StreamStatistics, batch: _ReadyBatch, result: pb.BatchResult
    ) -> list[memoryview]:
        """Run one batch, write its outcome into the result, and return its payloads."""
        try:
            if batch.prepared is None:
                raise batch.error or ServiceError(ErrorReason.INTERNAL, "the batch was lost")
            extraction = await self._extract(stream, batch.prepared)
            note_pass(pass_facts(batch.prepared.plan, extraction))
            if stream.fitting is not None:
                await stream.fitting.add(extraction)
        except ServiceError as error:
            if stream.fitting is not None:  # directions of the other batches would be of other data
                raise
            counts.failed_count += 1
            result.error.CopyFrom(_failure(error))
            return []
        counts.batch_count += 1
        if stream.fitting is not None:
            result.reply.SetInParent()
            return []
        result.reply.CopyFrom(reply_head(batch.prepared.plan, extraction))
        return values_of(extraction.feature_maps)

    async def _extract(self, stream: _Stream, prepared: Prepared) -> Extraction:
        """Run one batch; a stream waits where a single call would be refused as busy."""
        deadline = None if stream.timeout_s is None else time.monotonic() + stream.timeout_s
        while True:
            try:
                return await self._engine.extract(prepared, deadline, stream.statistics)
            except ServiceError as error:
                is_late = deadline is not None and time.monotonic() + _BUSY_PAUSE_S > deadline
                if error.reason is not ErrorReason.SERVER_BUSY or is_late:
                    raise
                await asyncio.sleep(_BUSY_PAUSE_S)
            except Exception as error:  # noqa: BLE001 - a defect fails this batch, not the stream
                _log.error("defect in a stream", exc_info=error)
                raise ServiceError(
                    ErrorReason.INTERNAL, "the server failed on this batch; its log has the details"
                ) from None

    def own_handlers(self) -> dict[str, Handler]:
        """Handlers with our own chunk codec in place of protobuf's copies."""
        extract: Handler = grpc.stream_stream_rpc_method_handler(
            self.extract_stream, request_deserializer=None, response_serializer=join_parts
        )
        return {"ExtractStream": extract}


def _end(stream: _Stream, counts: StreamStatistics, directions: Sequence[Direction]) -> list[Parts]:
    feature_maps = stream.statistics.feature_maps() if stream.statistics else ()
    end = pb.StreamEnd(
        feature_maps=map(describe, feature_maps),
        batch_count=counts.batch_count,
        failed_count=counts.failed_count,
        directions=directions,
    )
    head = pb.ExtractStreamResponse(end=end).SerializeToString()
    return list(framed(head, values_of(feature_maps), stream.plan.max_chunk_bytes))


def _failure(error: ServiceError) -> pb.BatchError:
    details = {key: sendable(value) for key, value in error.details.items()}
    return pb.BatchError(reason=error.reason, message=sendable(error.message), details=details)


def _first_index(start: pb.ExtractStreamStart) -> int:
    if start.first_batch_index < 0:
        raise invalid("first_batch_index", "is negative")
    return start.first_batch_index


def _timeout_s(start: pb.ExtractStreamStart) -> float | None:
    if not start.HasField("batch_timeout_s"):
        return None
    if not (math.isfinite(start.batch_timeout_s) and start.batch_timeout_s > 0):
        raise invalid("batch_timeout_s", "must be a finite number of seconds above 0")
    return start.batch_timeout_s


def _checkpoint_byte_count(start: pb.ExtractStreamStart) -> list[int]:
    count = start.checkpoint_byte_count
    if not 0 <= count <= MAX_CHECKPOINT_BYTES:
        raise invalid("checkpoint_byte_count", f"0 to {MAX_CHECKPOINT_BYTES:,} are allowed")
    if count and not start.has_running_statistics:
        raise invalid("checkpoint_byte_count", "a checkpoint is of running statistics")
    return [count] if count else []


_NOT_COMPUTED = {
    "max_chunk_bytes": "how values are sent",
    "start_inputs": "shapes of batches",
    "has_running_statistics": "is true wherever statistics are resumed",
    "first_batch_index": "where it goes on",
    "checkpoint_byte_count": "where it goes on",
    "checkpoint_interval": "how often it may be resumed",
    "batch_timeout_s": "a limit",
    "adapter": "has become the model",
}
"""Fields of a stream's start on which its statistics do not depend, each with its reason."""


def _settings(start: pb.ExtractStreamStart) -> bytes:
    """Serialised start of a stream, without the fields on which its statistics do not depend.

    How values are sent does not count. Labels, and classes given for each sample, do not either: they belong
    to the batches, and other batches may come in a separate stream. Of `execution` the numerics count.
    """
    counted = {field.name: value for field, value in start.ListFields() if field.name not in _NOT_COMPUTED}
    described = pb.ExtractStreamStart(**counted)
    described.execution.CopyFrom(Execution(numerics=start.execution.numerics))
    for tap in described.taps:
        tap.ClearField("values")
        tap.ClearField("cast")
    _clear_labels(described.objective)
    return described.SerializeToString(deterministic=True)


def _clear_labels(objective: Objective) -> None:
    for term in objective.terms:
        kind = term.WhichOneof("kind")
        if kind == "loss":
            term.loss.ClearField("labels")
        elif kind == "gradient_penalty":
            _clear_labels(term.gradient_penalty.of)
        elif kind == "class_score":
            if len(term.class_score.classes) > 1:
                term.class_score.ClearField("classes")
            if len(term.class_score.class_names) > 1:
                term.class_score.ClearField("class_names")


def _digest(parts: Sequence[bytes | memoryview]) -> str:
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _checkpoint_interval(start: pb.ExtractStreamStart) -> int:
    if not start.HasField("checkpoint_interval"):
        return _CHECKPOINT_INTERVAL
    if not 1 <= start.checkpoint_interval <= _MAX_CHECKPOINT_INTERVAL:
        raise invalid("checkpoint_interval", f"1 to {_MAX_CHECKPOINT_INTERVAL} are allowed")
    return start.checkpoint_interval
