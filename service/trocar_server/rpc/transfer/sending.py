"""Reply sending, with a timeout for callers that do not read."""

import asyncio
from collections.abc import Iterable
from typing import TypeVar

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.rpc.transfer.messages import CallContext

Message = TypeVar("Message")


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
