"""Connections of a gateway to the doors of servers in the same loop, in place of gRPC's; each can be lost."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from grpc.aio import EOF, AioRpcError, Metadata

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.orders.doorway import Call, Door


class DoorCall:
    """A call of a gateway to a replica, as far as it uses gRPC's."""

    def __init__(self, channel: DoorChannel, path: str, metadata: Any) -> None:
        self._channel = channel
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._read_count = 0
        self._lost = asyncio.Event()
        self._call: Call | None = None
        if channel.is_lost:
            self._lost.set()
            self._why = "failed to connect to all addresses"
        else:
            self._call = channel.door.open(path, self._arriving(), tuple(metadata))
            channel.calls.add(self)
            self._why = "Socket closed"

    def lose(self) -> None:
        """Break: the replica goes on, and nothing of it comes back."""
        self._lost.set()

    async def _arriving(self) -> AsyncIterator[bytes]:
        while (message := await self._messages.get()) is not None:
            yield message

    async def write(self, message: bytes) -> None:
        await asyncio.sleep(0)
        if self._lost.is_set():
            raise self._broken()
        self._messages.put_nowait(message)

    async def done_writing(self) -> None:
        await asyncio.sleep(0)
        self._messages.put_nowait(None)

    async def read(self) -> Any:
        call = self._call
        if call is None:
            await asyncio.sleep(0)
            raise self._broken()
        while not self._lost.is_set():
            if self._read_count < len(call.answer.replies):
                self._read_count += 1
                return call.answer.replies[self._read_count - 1]
            if call.task.done():
                return self._end(call)
            call.has_reply.clear()
            waits = [asyncio.ensure_future(call.has_reply.wait()), asyncio.ensure_future(self._lost.wait())]
            try:
                await asyncio.wait([call.task, *waits], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waits:
                    one.cancel()
        raise self._broken()

    async def trailing_metadata(self) -> Any:
        return () if self._call is None else self._call.answer.trailing

    def cancel(self) -> None:
        """Cancel the handler, unless the connection is lost: then the replica learns nothing of it."""
        self._channel.calls.discard(self)
        if self._call is not None and not self._lost.is_set():
            self._call.cancel()

    def _end(self, call: Call) -> Any:
        if call.answer.is_ok:
            return EOF
        code = grpc.StatusCode[call.answer.code] if call.answer.code != "GONE" else grpc.StatusCode.CANCELLED
        raise AioRpcError(code, Metadata(), Metadata(*call.answer.trailing), call.answer.message)

    def _broken(self) -> AioRpcError:
        return AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), self._why)


class DoorChannel:
    """A connection to a door."""

    def __init__(self, door: Door) -> None:
        self.door, self.is_lost = door, False
        self.calls: set[DoorCall] = set()

    def lose(self) -> None:
        """Lose the connection for good, and break the calls on it."""
        self.is_lost = True
        for call in self.calls:
            call.lose()

    def stream_stream(self, path: str) -> Any:
        return lambda metadata, timeout: DoorCall(self, path, metadata)

    def unary_stream(self, path: str) -> Any:
        return partial(self._once, path)

    def _once(self, path: str, message: bytes, metadata: Any, timeout: float | None) -> DoorCall:
        call = DoorCall(self, path, metadata)
        call._messages.put_nowait(message)
        call._messages.put_nowait(None)
        return call


class DoorChannels:
    """The connections of a gateway, by address; see `cluster.gateway.Channels`."""

    def __init__(self, doors: dict[str, Door]) -> None:
        self._channels = {address: DoorChannel(door) for address, door in doors.items()}

    def at(self, address: str) -> DoorChannel:
        return self._channels[address]

    def keep_only(self, addresses: set[str]) -> None:
        """Keep them all: which are lost is up to the test."""
