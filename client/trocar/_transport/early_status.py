"""Status of a call that the server ends while requests are still being sent, with asyncio.

grpc.aio replaces it: a message that can no longer be sent sets INTERNAL, "Internal error from Core", although
the server's own status has arrived (https://github.com/grpc/grpc/issues/36066, open with grpcio 1.85). The
callbacks of a call run once for each status, so that the first one can be kept.
"""

from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

Call = TypeVar("Call")

_REPLACEMENT = (grpc.StatusCode.INTERNAL, "Internal error from Core")


class AsyncStatusKept:
    """The messages of a call that takes a stream of requests; it fails with the status that the server sent.

    Args:
        call: Of `grpc.aio`, just begun.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._sent: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._keep)

    def cancel(self) -> bool:
        """End the call; without effect once it has ended."""
        return bool(self._call.cancel())

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        """Return the metadata that came with the status; waits for it."""
        found: grpc.aio.Metadata = await self._call.trailing_metadata()
        return found

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for message in self._call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise self._sent or error from None

    def _keep(self, call: Any) -> None:
        code, details = _known(call.code()), _known(call.details())
        if self._sent is None and code is not None and (code, details) != _REPLACEMENT:
            trailers = _known(call.trailing_metadata()) or grpc.aio.Metadata()
            debug_text = _known(call.debug_error_string())
            self._sent = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details, debug_text)


def async_status_kept(call: Any) -> AsyncStatusKept:
    """Return a call that fails with the status that the server sent."""
    return AsyncStatusKept(call)


def status_kept(call: Call) -> Call:
    """Return a call as it is: outside asyncio gRPC keeps the server's status itself."""
    return call


def _known(value: Coroutine[Any, Any, Any]) -> Any:
    """Return what a coroutine returns without waiting, as those of an ended call do; None if it waits.

    Later its answer may be another one.
    """
    try:
        value.send(None)
    except StopIteration as stop:
        return stop.value
    value.close()
    return None
