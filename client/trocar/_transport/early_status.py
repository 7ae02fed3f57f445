"""Status of a call that the server ends while requests are still being sent, with asyncio.

grpc.aio replaces it: a message that can no longer be sent sets INTERNAL, "Internal error from Core", although
the server's own status has arrived (https://github.com/grpc/grpc/issues/36066, open with grpcio 1.85). The
callbacks of a call run once for each status, so that the first one can be kept.
"""

from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import grpc
import grpc.aio

from trocar._transport.channel import end_call

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
        result: grpc.aio.Metadata = await self._call.trailing_metadata()
        return result

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


class StreamedCall:
    """The messages of a call that takes a stream of requests; ending it waits for no thread of gRPC.

    Args:
        call: Of gRPC, just begun.
    """

    def __init__(self, call: Any) -> None:
        self._call, self._has_ended = call, False

    def cancel(self) -> bool:
        """End the call; without effect once it has ended."""
        if not self._has_ended:
            end_call(self._call)  # or this waits for the thread that sends: Note: [Interrupted call]
        return not self._has_ended

    def trailing_metadata(self) -> Any:
        """Return the metadata that came with the status."""
        return self._call.trailing_metadata()

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._call
        except grpc.RpcError:
            self._has_ended = True
            raise
        self._has_ended = True


def async_status_kept(call: Any) -> AsyncStatusKept:
    """Return a call that fails with the status that the server sent."""
    return AsyncStatusKept(call)


def status_kept(call: Any) -> StreamedCall:
    """Return a call that can be ended at any time: outside asyncio gRPC keeps the server's status itself."""
    return StreamedCall(call)


def _known(value: Coroutine[Any, Any, Any]) -> Any:
    """Return what a coroutine returns without waiting, as for an ended call; None if it waits.

    Later its answer may be another one.
    """
    try:
        value.send(None)
    except StopIteration as stop:
        return stop.value
    value.close()
    return None
