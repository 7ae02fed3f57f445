"""Shared-memory lease: the long call that keeps memory lent, once for asyncio and once for threads."""

import asyncio
import threading
from queue import SimpleQueue
from typing import Any
from weakref import finalize

import grpc
import grpc.aio

from trocar._transport.channel import end_call
from trocar_api.v1.shared_memory_pb2 import ShareMemoryRequest, ShareMemoryResponse

ANSWER_WITHIN_S = 10.0
"""How long the server may take for one answer."""


class ExchangeEndedError(Exception):
    """The call has ended or was not answered: no memory is lent any more."""


class AsyncExchange:
    """Requests and answers, one by one, with asyncio.

    Args:
        method: `ShareMemory` of a channel.
        metadata: Metadata of the call.

    Raises:
        ExchangeEndedError: The channel is closed.
    """

    def __init__(self, method: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        try:
            self._call = method(metadata=metadata)
        except grpc.aio.UsageError as error:
            raise ExchangeEndedError from error
        finalize(self, self._call.cancel).atexit = False

    @property
    def is_alive(self) -> bool:
        """Whether the call is open."""
        return not self._call.done()

    async def ask(self, request: ShareMemoryRequest) -> ShareMemoryResponse:
        """Send a message and return the answer to it.

        Raises:
            ExchangeEndedError: There is none.
        """
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await self._call.write(request)
                answer = await self._call.read()
        except (grpc.RpcError, asyncio.InvalidStateError, TimeoutError) as error:
            raise ExchangeEndedError from error
        if not isinstance(answer, ShareMemoryResponse):
            raise ExchangeEndedError
        return answer

    def close(self) -> None:
        """End the call."""
        self._call.cancel()


class Exchange:
    """Requests and answers, one by one, with threads.

    Args:
        method: `ShareMemory` of a channel.
        metadata: Metadata of the call.
    """

    def __init__(self, method: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._requests: SimpleQueue[ShareMemoryRequest | None] = SimpleQueue()
        self._call = method(iter(self._requests.get, None), metadata=metadata)
        finalize(self, _end, self._call, self._requests).atexit = False

    @property
    def is_alive(self) -> bool:
        """Whether the call is open."""
        return bool(self._call.is_active())

    def ask(self, request: ShareMemoryRequest) -> ShareMemoryResponse:
        """Send a message and return the answer to it.

        Raises:
            ExchangeEndedError: There is none.
        """
        timer = threading.Timer(ANSWER_WITHIN_S, self._call.cancel)
        timer.start()
        try:
            self._requests.put(request)
            answer: ShareMemoryResponse = next(self._call)
        except (grpc.RpcError, StopIteration) as error:
            raise ExchangeEndedError from error
        finally:
            timer.cancel()
        return answer

    def close(self) -> None:
        """End the call."""
        _end(self._call, self._requests)


def _end(call: Any, requests: "SimpleQueue[ShareMemoryRequest | None]") -> None:
    requests.put(None)  # or gRPC's thread would wait for the next one for ever
    end_call(call)
