"""`SharedMemoryService`: lends memory for as long as a call lasts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import shared_memory_pb2 as pb
from trocar_server.errors import ServiceError
from trocar_server.rpc.fields import invalid
from trocar_server.rpc.principal import principal_of
from trocar_server.shared_memory import Lender, Loan

_SERVICE = "trocar_api.v1.SharedMemoryService"

MAP_WITHIN_S = 10.0
"""How long a segment has a name, at most."""


class SharedMemoryService:
    """Lends segments to callers on a Unix socket, and none to others.

    Args:
        lender: Whose; None where there is nothing to lend.
    """

    def __init__(self, lender: Lender | None) -> None:
        self._lender = lender
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End every call: what is lent goes when the calls that use it have ended."""
        self._stopping.set()

    async def share_memory(
        self, requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> None:
        """Answer each wish, until the caller or the server ends."""
        if self._lender is None:
            await self._refuse_all(requests, context)
            return
        loan = self._lender.loan(principal_of(context))
        try:
            while (message := await self._next(requests)) is not None:
                response = await _answer(loan, _parsed(message))
                await context.write(response.SerializeToString())
        finally:  # giving back takes 0.05 s for a gigabyte, and nobody waits for it
            asyncio.get_running_loop().run_in_executor(None, loan.end)

    async def _refuse_all(self, requests: AsyncIterator[bytes], context: Any) -> None:
        while (message := await self._next(requests)) is not None:
            _parsed(message)
            why = "this server lends no shared memory; it does so on a Unix socket only"
            await context.write(pb.ShareMemoryResponse(refused=why).SerializeToString())

    async def _next(self, requests: AsyncIterator[bytes]) -> bytes | None:
        """Return the next message, or None at the end of the call and when the server stops."""
        reading = asyncio.ensure_future(anext(requests, None))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else None
        finally:
            for task in (reading, stopping):
                if not task.done():
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler; messages are parsed within the call, where an error has a reason."""
        method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self.share_memory)
        return grpc.method_handlers_generic_handler(_SERVICE, {"ShareMemory": method})


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
    loop = asyncio.get_running_loop()
    loop.call_later(MAP_WITHIN_S, loop.run_in_executor, None, loan.expire, segment.id)
    described = pb.Segment(id=segment.id, name=segment.name, byte_count=segment.byte_count)
    return pb.ShareMemoryResponse(segment=described)
