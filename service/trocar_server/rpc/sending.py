"""Messages of a reply on their way to somebody who may not read them."""

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar

import grpc

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

Message = TypeVar("Message")


async def send(
    context: "grpc.aio.ServicerContext[Any, Message]", messages: Iterable[Message], stall_timeout_s: float
) -> None:
    """Send messages one by one, each when the one before has gone; give up on who does not read.

    Args:
        context: Of the call.
        messages: What to send.
        stall_timeout_s: How long one message may take, in seconds.

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
