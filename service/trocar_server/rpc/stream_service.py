"""`StreamService`: many batches in one call, in order, a bounded number under way."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import grpc
import structlog

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import stream_pb2 as pb
from trocar_server.engine.engine import Engine, Extraction
from trocar_server.engine.plan import Payload
from trocar_server.engine.work import Prepared
from trocar_server.errors import ServiceError
from trocar_server.rpc.ahead import ahead
from trocar_server.rpc.batches import Batch, StreamReader
from trocar_server.rpc.fields import invalid
from trocar_server.rpc.replies import Parts, framed, join_parts, reply_head, values_of
from trocar_server.rpc.requests import base_plan, check_request_bytes, constant_byte_counts
from trocar_server.rpc.text import sendable

_SERVICE = "trocar_api.v1.StreamService"
_BUSY_PAUSE_S = 0.1
_log = structlog.get_logger("trocar")


@dataclass
class _Ready:
    """A batch whose images are decoded, or which failed before."""

    index: int
    prepared: Prepared | None
    error: ServiceError | None = None


class StreamService:
    """Runs hosted models for callers of `StreamService`.

    Three stages work at the same time, each one batch ahead of the next: receiving and decoding, the
    pass, sending. So the model need not wait, and a call holds a handful of batches at most: who does
    not read his replies is not read from.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def extract_stream(
        self, requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, Parts]"
    ) -> None:
        """Answer every batch, then say that all were answered."""
        reader = StreamReader(requests, self._engine.limits)
        start, chunks = await reader.start()
        plan = base_plan(start, self._engine.limits)
        await self._engine.check_taps(plan)
        byte_counts = constant_byte_counts(plan)
        check_request_bytes(byte_counts, self._engine.limits)
        constants = await reader.payloads(byte_counts, chunks)
        counts = pb.StreamEnd()
        ready = self._ready(ahead(reader.batches(plan, _first_index(start))), constants)
        results = self._results(ahead(ready), _timeout_s(start), counts)
        async with aclosing(ahead(results)) as messages:
            async for result in messages:
                for parts in result:
                    await context.write(parts)
        await context.write([pb.ExtractStreamResponse(end=counts).SerializeToString()])

    async def _ready(
        self, batches: AsyncGenerator[Batch, None], constants: Sequence[Payload]
    ) -> AsyncGenerator[_Ready, None]:
        async with aclosing(batches):
            async for batch in batches:
                yield await self._decoded(batch, constants)

    async def _decoded(self, batch: Batch, constants: Sequence[Payload]) -> _Ready:
        if batch.error is not None:
            return _Ready(batch.index, None, batch.error)
        try:
            await self._engine.check(batch.plan)
            return _Ready(batch.index, await self._engine.prepare(batch.plan, batch.payloads, constants))
        except ServiceError as error:
            return _Ready(batch.index, None, error.with_traceback(None))

    async def _results(
        self, batches: AsyncGenerator[_Ready, None], timeout_s: float | None, counts: pb.StreamEnd
    ) -> AsyncGenerator[list[Parts], None]:
        async with aclosing(batches):
            async for batch in batches:
                try:
                    if batch.prepared is None:
                        raise batch.error or ServiceError(ErrorReason.INTERNAL, "the batch was lost")
                    extraction = await self._extract(batch.prepared, timeout_s)
                    counts.batch_count += 1
                    yield _reply(batch.index, batch.prepared, extraction)
                except ServiceError as error:
                    counts.failed_count += 1
                    yield [[_failure(batch.index, error)]]

    async def _extract(self, prepared: Prepared, timeout_s: float | None) -> Extraction:
        """Run one batch; a stream waits where a single call would be told to come again."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                return await self._engine.extract(prepared, deadline)
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

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler with our own chunk codec in place of protobuf's copies."""
        method: grpc.RpcMethodHandler[bytes, Parts] = grpc.stream_stream_rpc_method_handler(
            self.extract_stream, request_deserializer=None, response_serializer=join_parts
        )
        return grpc.method_handlers_generic_handler(_SERVICE, {"ExtractStream": method})


def _reply(index: int, prepared: Prepared, extraction: Extraction) -> list[Parts]:
    head = pb.ExtractStreamResponse(
        result=pb.BatchResult(batch_index=index, reply=reply_head(prepared.plan, extraction))
    )
    payloads = values_of(extraction.feature_maps)
    return list(framed(head.SerializeToString(), payloads, prepared.plan.max_chunk_bytes))


def _failure(index: int, error: ServiceError) -> bytes:
    details = {key: sendable(value) for key, value in error.details.items()}
    problem = pb.BatchError(reason=error.reason, message=sendable(error.message), details=details)
    result = pb.BatchResult(batch_index=index, error=problem)
    return pb.ExtractStreamResponse(result=result).SerializeToString()


def _first_index(start: pb.ExtractStreamStart) -> int:
    if start.first_batch_index < 0:
        raise invalid("first_batch_index", "is negative")
    return start.first_batch_index


def _timeout_s(start: pb.ExtractStreamStart) -> float | None:
    if not start.HasField("batch_timeout_s"):
        return None
    if not (math.isfinite(start.batch_timeout_s) and start.batch_timeout_s > 0):
        raise invalid("batch_timeout_s", "is no finite number of seconds above 0")
    return start.batch_timeout_s
