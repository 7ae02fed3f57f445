"""A TCP proxy between client and server that breaks connections on request."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

from tests.support.servers.event_loop import event_loop


class Proxy:
    """Handle of a running proxy.

    Args:
        target: Host and port of the server.
        loop: Where the proxy runs.

    Attributes:
        loses_replies: Whether what comes from the server is lost.
    """

    def __init__(self, target: tuple[str, int], loop: asyncio.AbstractEventLoop) -> None:
        self._target = target
        self._loop = loop
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._left_bytes: int | None = None
        self.connection_count = 0
        self.up_bytes = 0
        self.down_bytes = 0
        self.loses_replies = False
        self.port = 0

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self.port}"

    def break_connections(self) -> None:
        """Reset every connection that is open; new ones are served."""
        asyncio.run_coroutine_threadsafe(self._break(), self._loop).result(10)

    def break_after(self, byte_count: int) -> None:
        """Reset every connection, once, when so many bytes more have come from clients."""
        self._left_bytes = byte_count

    def refuse(self) -> None:
        """Break every connection and serve no more."""
        asyncio.run_coroutine_threadsafe(self.stop(), self._loop).result(10)

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Break everything and stop listening."""
        assert self._server is not None
        self._server.close()
        await self._break()

    async def _break(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _count(self, byte_count: int) -> None:
        self.up_bytes += byte_count
        if self._left_bytes is not None:
            self._left_bytes -= byte_count
            if self._left_bytes <= 0:
                self._left_bytes = None
                await self._break()

    async def _count_down(self, byte_count: int) -> None:
        self.down_bytes += byte_count

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, far_writer}
        try:
            up = _copy(reader, far_writer, self._count)
            down = _copy(far_reader, writer, self._count_down, lambda: self.loses_replies)
            await asyncio.gather(up, down)
        finally:
            for end in (writer, far_writer):
                self._writers.discard(end)
                end.transport.abort()


async def _copy(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    count: Callable[[int], Awaitable[None]],
    loses: Callable[[], bool] = lambda: False,
) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            if not loses():
                writer.write(data)
                await writer.drain()
            await count(len(data))
    writer.transport.abort()


@contextmanager
def running_proxy(address: str) -> Iterator[Proxy]:
    """Run a proxy to a server at `host:port` until the context ends."""
    host, _, port = address.rpartition(":")
    with event_loop("proxy-loop") as loop:
        proxy = Proxy((host, int(port)), loop)
        try:
            asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(10)
            yield proxy
        finally:
            asyncio.run_coroutine_threadsafe(proxy.stop(), loop).result(10)
