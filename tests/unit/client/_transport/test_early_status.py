"""Calls of grpc.aio that a server ends early: the status that it sent is kept."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from trocar._transport.early_status import async_status_kept

TIMES = 20
PART, PARTS = bytes(64 << 10), 64


async def parts() -> AsyncIterator[bytes]:
    for _ in range(PARTS):
        yield PART


async def refuse(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("x-wait", "3"),))
    yield b""


async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    handlers: dict[str, Any] = {
        "Refuse": grpc.stream_stream_rpc_method_handler(refuse),
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Early", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
        yield opened
    await server.stop(None)


async def test_a_stream_fails_as_the_server_said(channel: grpc.aio.Channel) -> None:
    method: Any = channel.stream_stream("/Early/Refuse")
    for _ in range(TIMES):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in async_status_kept(method(parts())):
                pass
        error = failure.value
        assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        assert dict(error.trailing_metadata())["x-wait"] == "3"


async def test_a_call_that_succeeds_is_as_it_was(channel: grpc.aio.Channel) -> None:
    echoed = [part async for part in async_status_kept(echo_call(channel))]
    assert echoed == [PART] * PARTS


async def test_a_call_that_is_cancelled_says_so(channel: grpc.aio.Channel) -> None:
    call = async_status_kept(echo_call(channel))
    stream = aiter(call)
    assert await anext(stream) == PART
    assert call.cancel()
    with pytest.raises(asyncio.CancelledError):
        async for _ in stream:
            pass


def echo_call(channel: grpc.aio.Channel) -> Any:
    method: Any = channel.stream_stream("/Early/Echo")
    return method(parts())
