"""Reply sending: compression on request, and a timeout for callers that do not read."""

import asyncio
from collections.abc import Iterable
from typing import TypeVar

import grpc

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.rpc.transfer.messages import CallContext

Message = TypeVar("Message")


COMPRESSION_KEY = "x-reply-compression"
"""Metadata key to request gzip; gRPC's own header of the request never reaches a handler (grpcio 1.81)."""


def compress_if_asked(context: CallContext) -> None:
    """Compress the messages of the reply if the caller requests gzip; call it before the first is sent."""
    for key, value in context.invocation_metadata() or ():
        if key == COMPRESSION_KEY and value == "gzip":
            context.set_compression(grpc.Compression.Gzip)


async def send(context: CallContext, messages: Iterable[Message], stall_timeout_s: float) -> None:
    """Send messages in order, each once the previous one is sent; stop if the caller does not read.

    Args:
        context: The call's context.
        messages: The messages.
        stall_timeout_s: The timeout of one message, in seconds.

    Raises:
        ServiceError: `DEADLINE_EXCEEDED`, nothing was read for that long.
    """
    for message in messages:
        try:
            async with asyncio.timeout(stall_timeout_s):
                await context.write(message)
        except TimeoutError:
            raise ServiceError(
                ErrorReason.DEADLINE_EXCEEDED,
                f"the reply was not read for {stall_timeout_s:.6g} s; the call was ended",
            ) from None
