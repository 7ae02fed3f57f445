"""`ExtractionService`: check, receive, run, stream."""

import time
from collections.abc import AsyncIterator

import grpc
from google.protobuf.message import DecodeError

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.wire import Chunk, WireError, split_message
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.rpc.payloads import PayloadReceiver
from trocar_server.rpc.replies import Parts, join_parts, reply_messages
from trocar_server.rpc.requests import to_plan

_SERVICE = "trocar_api.v1.ExtractionService"


class ExtractionService:
    """Runs hosted models for callers of `ExtractionService`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def extract(
        self, requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, Parts]"
    ) -> None:
        """Check, receive, run one pass, stream; the replica is free before the first byte goes out."""
        deadline = _deadline(context)
        first = await anext(requests, None)
        if first is None:
            raise ServiceError(ErrorReason.INVALID_ARGUMENT, "the call has no message")
        head, chunks = _split(first)
        plan, byte_counts = to_plan(_parse(head), self._engine.limits)
        await self._engine.check(plan, deadline)
        receiver = PayloadReceiver(byte_counts)
        receiver.feed(chunks)
        while not receiver.is_complete:
            message = await anext(requests, None)
            if message is None:
                break
            receiver.feed(_split(message)[1])
        extraction = await self._engine.extract(plan, receiver.finish(), deadline)
        del receiver, chunks, first
        for parts in reply_messages(plan, extraction):
            await context.write(parts)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler with our own chunk codec in place of protobuf's copies."""
        method: grpc.RpcMethodHandler[bytes, Parts] = grpc.stream_stream_rpc_method_handler(
            self.extract, request_deserializer=None, response_serializer=join_parts
        )
        return grpc.method_handlers_generic_handler(_SERVICE, {"Extract": method})


def _deadline(context: "grpc.aio.ServicerContext[bytes, Parts]") -> float | None:
    remaining_s: float | None = context.time_remaining()  # None without a deadline, whatever its type says
    return None if remaining_s is None else time.monotonic() + remaining_s


def _split(message: bytes) -> tuple[bytes, list[Chunk]]:
    try:
        return split_message(message)
    except WireError as error:
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, f"the message is no protobuf: {error}") from None


def _parse(head: bytes) -> pb.ExtractRequest:
    try:
        return pb.ExtractRequest.FromString(head)
    except DecodeError:
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, "the message is no ExtractRequest") from None
