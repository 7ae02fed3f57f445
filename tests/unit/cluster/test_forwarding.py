"""Calls under way while the replicas of a gateway change: real servers of gRPC, without models."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.support.servers.replica_report import replica_report
from trocar_server.cluster import caller_messages
from trocar_server.cluster.gateway import Gateway
from trocar_server.cluster.routing import ReplicaTable

METHOD = "/trocar_api.v1.StreamService/ExtractStream"


class EveryMethod(grpc.GenericRpcHandler):
    """Handles every method with one behaviour."""

    def __init__(self, behaviour: Any) -> None:
        self._behaviour = behaviour

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._behaviour)


@asynccontextmanager
async def serving(handler: grpc.GenericRpcHandler) -> AsyncIterator[str]:
    """Start a server; yields its address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class SlowReplica:
    """A replica that replies with two messages: when it is told to, and once the first one has arrived."""

    def __init__(self) -> None:
        self.has_call, self.may_reply, self.may_end = (asyncio.Event() for _ in range(3))

    async def reply(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        message = await anext(aiter(requests))
        self.has_call.set()
        for number, allowed in enumerate((self.may_reply, self.may_end)):
            await allowed.wait()
            yield message + bytes((number,))


@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
async def test_a_call_ends_where_it_began_though_its_replica_has_left(kind: str) -> None:
    replica, gateway = SlowReplica(), Gateway(ReplicaTable())
    async with (
        serving(EveryMethod(replica.reply)) as address,
        serving(gateway.handler()) as gateway_address,
        grpc.aio.insecure_channel(gateway_address) as channel,
    ):
        gateway.update([replica_report("one", "model", address)], {"model": 1})
        begin: Any = getattr(channel, kind)(METHOD)
        if kind == "unary_stream":  # the gateway knows that there is one message
            call = begin(b"x", timeout=20)
        else:
            call = begin(timeout=20)
            await call.write(b"x")
        await replica.has_call.wait()
        gateway.update([], {"model": 1})
        await asyncio.sleep(0)  # what that began is under way
        replica.may_reply.set()
        found = [await call.read()]
        replica.may_end.set()
        found.append(await call.read())
        assert found == [b"x\0", b"x\1"]
        assert await call.read() is grpc.aio.EOF


async def test_connections_to_replicas_that_left_end_with_their_last_call() -> None:
    replica, gateway = SlowReplica(), Gateway(ReplicaTable())
    replica.may_reply.set()
    replica.may_end.set()
    async with (
        serving(EveryMethod(replica.reply)) as address,
        serving(gateway.handler()) as gateway_address,
        grpc.aio.insecure_channel(gateway_address) as channel,
    ):
        gateway.update([replica_report("one", "model", address)], {"model": 1})
        closed = weakref.ref(gateway.channels.at(address))
        begin: Any = channel.unary_stream(METHOD)
        call = begin(b"x", timeout=20)
        assert [message async for message in call] == [b"x\0", b"x\1"]
        assert closed() is not None
        gateway.update([], {"model": 1})
        gc.collect()
        assert closed() is None


async def test_a_call_that_is_cancelled_as_it_begins_is_counted_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gateway looks whether another message of the caller follows; none does, nor the end of them."""
    monkeypatch.setattr(caller_messages, "_PEEK_S", 20.0)
    gateway = Gateway(ReplicaTable())
    async with (
        serving(EveryMethod(SlowReplica().reply)) as address,
        serving(gateway.handler()) as gateway_address,
        grpc.aio.insecure_channel(gateway_address) as channel,
    ):
        gateway.update([replica_report("one", "model", address)], {"model": 1})
        (replica,) = gateway.table.all()
        begin: Any = channel.stream_stream(METHOD)
        call = begin(timeout=20)
        await call.write(b"x")
        async with asyncio.timeout(20):
            while not replica.open_count:  # noqa: ASYNC110 - it counts calls, it tells nobody
                await asyncio.sleep(0.01)
            call.cancel()
            while gateway.work_count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert replica.open_count == 0
