"""`PreparedCallService`: keeps requests prepared for processes of the server's user on this host."""

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial

import grpc
from google.protobuf.message import DecodeError

from trocar_api.descriptors import MAX_SLOTS, Ask, SlotLayout
from trocar_api.reasons import ErrorReason
from trocar_api.v1 import prepared_pb2 as pb
from trocar_server.errors import ServiceError
from trocar_server.rpc.call.interceptor import REQUEST_ID_KEY, CallInterceptor
from trocar_server.rpc.call.principal import principal_of
from trocar_server.rpc.codec.fields import invalid
from trocar_server.rpc.listen.registration import Handler
from trocar_server.rpc.services.extraction_service import ExtractionService
from trocar_server.rpc.services.prepared_calls import PreparedCalls, Serve
from trocar_server.rpc.transfer.messages import CallContext
from trocar_server.rpc.transfer.plan_cache import PlannedRequest
from trocar_server.rpc.transfer.shared_payloads import SharedPayloads
from trocar_server.shared_memory import CallSocket, Lender, Loan, Segment
from trocar_server.shared_memory.lender import UNUSED_S

CONNECT_WITHIN_S = 10.0
"""The longest time that a call socket keeps its name."""

_EXTRACT = "/trocar_api.v1.ExtractionService/Extract"
_LEAST_HEAD_BYTES, _MOST_HEAD_BYTES = 8 << 10, 1 << 20
"""Room for the rest of a reply: a status takes up to 5 KiB."""


class PreparedCallService:
    """Servicer that keeps requests prepared for callers on a Unix socket, and none for others.

    Args:
        extraction: Makes the calls.
        interceptor: Around every call.
        lender: Owns the memory; None if there is nothing to lend.
    """

    def __init__(
        self, extraction: ExtractionService, interceptor: CallInterceptor, lender: Lender | None
    ) -> None:
        self._extraction = extraction
        self._interceptor = interceptor
        self._lender = lender
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Accept no more prepared calls; each connection ends with its last running call."""
        self._stopping.set()

    async def prepare_calls(self, message: bytes, context: CallContext) -> None:
        """Prepare a request, and make its calls until the caller or the server ends."""
        request = _parsed(message)
        if self._lender is None:
            await _refuse(context, "prepared calls need shared memory, which is off or not on this address")
            return
        principal = principal_of(context)
        planned, payload_bytes = await self._extraction.prepared(request.request, principal)
        head_bytes = max(request.head_byte_count, _LEAST_HEAD_BYTES)
        layout = SlotLayout(payload_bytes, request.reply_byte_count, head_bytes)
        loan = self._lender.loan(principal)
        try:
            await self._lend(
                loan, layout, request.slot_count, partial(self._serve, planned, context), context
            )
        finally:  # releasing takes 0.05 s for a gigabyte, and no caller waits for it
            asyncio.get_running_loop().run_in_executor(None, loan.end)

    async def _lend(
        self, loan: Loan, layout: SlotLayout, slot_count: int, serve: Serve, context: CallContext
    ) -> None:
        """Lend the memory of the slots, and make calls."""
        try:
            segment = await asyncio.to_thread(loan.open, layout.slot_bytes * slot_count)
        except ServiceError as error:
            await _refuse(context, error.message)
            return
        segment.remove_name()  # its file is handed over instead
        connection = await self._connection(segment, layout, slot_count, context)
        if connection is None:
            return
        await self._over(PreparedCalls(connection, segment, layout, slot_count, serve))

    async def _connection(
        self, segment: Segment, layout: SlotLayout, slot_count: int, context: CallContext
    ) -> socket.socket | None:
        """Name a socket, and wait for the caller on it; None if it does not come."""
        assert self._lender is not None  # asked before
        with CallSocket(self._lender.folder) as listening:
            prepared = pb.PreparedCalls(
                socket_name=listening.path.name,
                payload_byte_count=layout.payload_bytes,
                reply_byte_count=layout.reply_bytes,
                head_byte_count=layout.head_bytes,
                slot_count=slot_count,
            )
            await context.write(pb.PrepareCallsResponse(prepared=prepared).SerializeToString())
            try:
                async with asyncio.timeout(CONNECT_WITHIN_S):
                    return await listening.connection(segment)
            except TimeoutError:
                return None

    async def _over(self, calls: PreparedCalls) -> None:
        """Wait until the connection has ended or is idle; or until the server stops and calls have ended.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, the caller broke the rules of the connection.
        """
        ended = asyncio.ensure_future(calls.ended(UNUSED_S))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await calls.finish()
        finally:
            ended.cancel()
            stopping.cancel()
            calls.close()
        if calls.problem:
            raise ServiceError(ErrorReason.INVALID_ARGUMENT, f"prepared calls were ended: {calls.problem}")

    async def _serve(
        self,
        planned: PlannedRequest,
        context: CallContext,
        ask: Ask,
        lent: SharedPayloads,
        answer: Callable[[bytes | None], None],
    ) -> None:
        """Make the call of a descriptor as one of `Extract`."""
        deadline = time.monotonic() + ask.timeout_s

        async def work() -> None:
            answer(await self._extraction.answer_prepared(planned, lent, deadline))

        await self._interceptor.beside(_EXTRACT, context, _headers(ask), work)

    def own_handlers(self) -> dict[str, Handler]:
        """Handlers on bytes: messages are parsed within the call, so that an error carries a reason."""
        return {"PrepareCalls": grpc.unary_stream_rpc_method_handler(self.prepare_calls)}


def _headers(ask: Ask) -> Mapping[str, str]:
    headers = {REQUEST_ID_KEY: ask.request_id.hex()}
    if traceparent := ask.traceparent:
        headers["traceparent"] = traceparent
    return headers


def _parsed(message: bytes) -> pb.PrepareCallsRequest:
    try:
        request = pb.PrepareCallsRequest.FromString(message)
    except DecodeError:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT, "the message is not the request of this method"
        ) from None
    if not 1 <= request.slot_count <= MAX_SLOTS:
        raise invalid("slot_count", f"{request.slot_count} is not in the range 1 to {MAX_SLOTS}")
    if request.reply_byte_count < 0:
        raise invalid("reply_byte_count", f"{request.reply_byte_count} is negative")
    if not 0 <= request.head_byte_count <= _MOST_HEAD_BYTES:
        raise invalid(
            "head_byte_count", f"{request.head_byte_count} is not in the range 0 to {_MOST_HEAD_BYTES:,}"
        )
    return request


async def _refuse(context: CallContext, why: str) -> None:
    await context.write(pb.PrepareCallsResponse(refused=why).SerializeToString())
