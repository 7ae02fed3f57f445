"""How a server in this process ends its calls."""

import asyncio

import grpc
import pytest
from grpc import aio

from trocar_server.app.local import _cancel_others

_TICKS = range(4)
"""How often the loop turns between the end of a call and the end of the rest."""


async def cancelled_call_ends(ticks: int) -> None:
    begun, cancelled, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(_request: bytes, _context: object) -> bytes:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
            await may_end.wait()
        return b""

    server = aio.server()
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "call": grpc.unary_unary_rpc_method_handler(handle)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("calls", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/calls/call")
        call = method(b"")
        await begun.wait()
        call.cancel()
        await cancelled.wait()
        await server.stop(None)
        may_end.set()
        for _ in range(ticks):
            await asyncio.sleep(0)
        await _cancel_others()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("ticks", _TICKS)
def test_a_call_that_is_cancelled_as_it_ends_writes_nothing(
    ticks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(cancelled_call_ends(ticks))
    assert "Traceback" not in capfd.readouterr().err


def test_other_tasks_are_cancelled() -> None:
    async def end() -> asyncio.Task[bool]:
        task = asyncio.create_task(asyncio.Event().wait())
        await asyncio.sleep(0)
        await _cancel_others()
        return task

    assert asyncio.run(end()).cancelled()
