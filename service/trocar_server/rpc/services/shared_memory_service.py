"""`SharedMemoryService`: lends memory for the duration of a call."""

import asyncio
from collections.abc import AsyncIterator

import grpc
from google.protobuf.message import DecodeError

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import shared_memory_pb2 as pb
from trocar_server.errors import ServiceError
from trocar_server.rpc.call.principal import principal_of
from trocar_server.rpc.codec.fields import invalid
from trocar_server.rpc.listen.registration import Handler
from trocar_server.rpc.transfer.messages import CallContext
from trocar_server.shared_memory import Lender, Loan
from trocar_server.tasks import begin

MAP_WITHIN_S = 10.0
"""The longest time that a segment keeps its name."""


class SharedMemoryService:
    """Servicer that lends segments to callers on a Unix socket, and none to others.

    Args:
        lender: Owns the segments; None if there is nothing to lend.
    """

    def __init__(self, lender: Lender | None) -> None:
        self._lender = lender
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End every call: lent segments are released when the calls that use them have ended."""
        self._stopping.set()

    async def share_memory(self, requests: AsyncIterator[bytes], context: CallContext) -> None:
        """Answer each request, until the caller or the server ends."""
        if self._lender is None:
            await self._refuse_all(requests, context)
            return
        loan = self._lender.loan(principal_of(context))
        watches: set[asyncio.Task[None]] = set()
        try:
            while (message := await self._next(requests)) is not None:
                response = await _answer(loan, _parsed(message))
                if response.HasField("segment"):
                    begin(_expire(loan, response.segment.id), watches)
                await context.write(response.SerializeToString())
        finally:  # releasing takes 0.05 s for a gigabyte, and no caller waits for it
            for watch in watches:
                watch.cancel()
            asyncio.get_running_loop().run_in_executor(None, loan.end)

    async def _refuse_all(self, requests: AsyncIterator[bytes], context: CallContext) -> None:
        while (message := await self._next(requests)) is not None:
            _parsed(message)
            why = "shared memory is off; it is available on a Unix socket only"
            await context.write(pb.ShareMemoryResponse(refused=why).SerializeToString())

    async def _next(self, requests: AsyncIterator[bytes]) -> bytes | None:
        """Return the next message, or None at the end of the call and when the server stops."""
        reading = asyncio.ensure_future(anext(requests, None))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else None
        finally:
            reading.cancel()
            stopping.cancel()
            await asyncio.wait((reading, stopping))  # raises what cancels this call, never their own cancel

    def own_handlers(self) -> dict[str, Handler]:
        """Handlers on bytes: messages are parsed within the call, so that an error carries a reason."""
        return {"ShareMemory": grpc.stream_stream_rpc_method_handler(self.share_memory)}


def _parsed(message: bytes) -> pb.ShareMemoryRequest:
    try:
        return pb.ShareMemoryRequest.FromString(message)
    except DecodeError:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT, "the message is not the request of this method"
        ) from None


async def _answer(loan: Loan, request: pb.ShareMemoryRequest) -> pb.ShareMemoryResponse:
    part = request.WhichOneof("part")
    if part == "open":
        return await _open(loan, request.open.byte_count)
    if part == "mapped":
        loan.release_name(request.mapped)
        return pb.ShareMemoryResponse(ready=request.mapped)
    if part == "close":
        await asyncio.to_thread(loan.close, request.close)
        return pb.ShareMemoryResponse(closed=request.close)
    raise invalid("part", "is not set; send open, mapped or close")


async def _open(loan: Loan, byte_count: int) -> pb.ShareMemoryResponse:
    try:
        segment = await asyncio.to_thread(loan.open, byte_count)
    except ServiceError as error:
        if error.reason is ErrorReason.INVALID_ARGUMENT:
            raise
        return pb.ShareMemoryResponse(refused=error.message)
    described = pb.Segment(id=segment.id, name=segment.name, byte_count=segment.byte_count)
    return pb.ShareMemoryResponse(segment=described)


async def _expire(loan: Loan, segment_id: str) -> None:
    """Release a segment that is not mapped in time, or that no call uses any more."""
    left_s: float | None = MAP_WITHIN_S
    while left_s is not None:
        await asyncio.sleep(left_s)
        left_s = await asyncio.to_thread(loan.expire, segment_id)
