"""Gateways whose replicas come, go and are silent: real servers of gRPC, without models."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from tests.support.servers.replica_report import replica_report
from tests.unit.cluster.test_forwarding import EveryMethod, serving
from trocar_api.reasons import ErrorReason
from trocar_api.v1 import model_pb2 as pb
from trocar_api.v1.trainer_pb2 import GetTrainerRequest
from trocar_server.cluster import gateway as gateway_module
from trocar_server.cluster.gateway import Gateway
from trocar_server.cluster.routes import Subject
from trocar_server.cluster.routing import ReplicaTable
from trocar_server.errors import ServiceError
from trocar_server.rpc.call.status import DETAILS_KEY, STATUS_CODES, status_details, status_message
from trocar_server.training.files.trainer_store import damaged_record, moved

LIST = "/trocar_api.v1.ModelService/ListModels"
GET = "/trocar_api.v1.ModelService/GetModel"
GET_TRAINER = "/trocar_api.v1.TrainerService/GetTrainer"
FLOWERS = pb.GetModelRequest(model_id="flowers").SerializeToString()
WAIT_S = 20.0

Answer = Callable[[int], Any]
"""Returns a reply, an error, or a wait, by how many calls came before."""


def unknown(_: int) -> ServiceError:
    return ServiceError(ErrorReason.UNKNOWN_MODEL, "no model 'flowers'")


def silent(_: int) -> asyncio.Event:
    return asyncio.Event()  # which nobody sets


class Cluster:
    """A gateway and its replicas, each of which answers every method in one way."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.gateway = Gateway(ReplicaTable(), hold_s=WAIT_S)
        self._reports: list[dict[str, Any]] = []
        self.call_count = 0

    async def start(self, *answers: Answer) -> grpc.aio.Channel:
        """Start the replicas `0`, `1`, ...; returns a connection to the gateway."""
        for answer in answers:
            await self._replica(answer)
        self.gateway.update(self._reports, {"model": 1})
        address = await self._stack.enter_async_context(serving(self.gateway.handler()))
        return await self._stack.enter_async_context(grpc.aio.insecure_channel(address))

    async def _replica(self, answer: Answer) -> None:
        counts = iter(range(1000))

        async def reply(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
            await anext(aiter(requests))
            self.call_count += 1
            found = answer(next(counts))
            if isinstance(found, asyncio.Event):
                await found.wait()
            if isinstance(found, ServiceError):
                details = ((DETAILS_KEY, status_details(found, "")),)
                await context.abort(STATUS_CODES[found.reason], status_message(found), details)
            yield found

        address = await self._stack.enter_async_context(serving(EveryMethod(reply)))
        number = str(len(self._reports))
        self._reports.append(replica_report(number, "model", address, slot=number))


async def called(channel: grpc.aio.Channel, method: str, message: bytes = b"") -> bytes:
    begin: Any = channel.unary_unary(method)
    reply: bytes = await begin(message, timeout=WAIT_S)
    return reply


@pytest.fixture(autouse=True)
def _short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "_PROBE_S", 0.2)


async def test_a_silent_replica_is_left_out_of_lists() -> None:
    own = pb.ListModelsResponse(models=[pb.Model(model_id="model")])
    async with AsyncExitStack() as stack:
        channel = await Cluster(stack).start(lambda _: own.SerializeToString(), silent)
        assert pb.ListModelsResponse.FromString(await called(channel, LIST)) == own


async def test_a_list_of_which_nobody_answers_may_be_asked_for_again() -> None:
    async with AsyncExitStack() as stack:
        channel = await Cluster(stack).start(silent)
        with pytest.raises(grpc.aio.AioRpcError, match="no replica answers") as error:
            await called(channel, LIST)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_model_of_a_silent_replica_is_not_unknown() -> None:
    async with AsyncExitStack() as stack:
        late = lambda count: silent(count) if count == 0 else b"flowers"  # noqa: E731
        channel = await Cluster(stack).start(unknown, late)
        assert await called(channel, GET, FLOWERS) == b"flowers"


async def test_a_published_model_is_not_unknown_while_another_replica_takes_it() -> None:
    async with AsyncExitStack() as stack:
        cluster = Cluster(stack)
        channel = await cluster.start(lambda count: unknown(count) if count < 3 else b"flowers")
        cluster.gateway.remember(Subject.MODEL, "flowers", "gone")
        assert await called(channel, GET, FLOWERS) == b"flowers"
        assert cluster.gateway.home(Subject.MODEL, "flowers") == "0"


@pytest.mark.parametrize("is_remembered", [True, False])
async def test_a_model_that_nobody_takes_is_unknown(
    monkeypatch: pytest.MonkeyPatch, is_remembered: bool
) -> None:
    monkeypatch.setattr(gateway_module, "_TAKEN_WITHIN_S", 0.1 if is_remembered else 1e6)
    async with AsyncExitStack() as stack:
        cluster = Cluster(stack)
        channel = await cluster.start(unknown)
        if is_remembered:
            cluster.gateway.remember(Subject.MODEL, "flowers", "gone")
        for count in (2 + is_remembered, 2):  # later calls do not wait
            cluster.call_count = 0
            with pytest.raises(grpc.aio.AioRpcError, match="no model 'flowers'"):
                await called(channel, GET, FLOWERS)
            assert cluster.call_count == count


async def test_the_replica_with_a_damaged_trainer_says_so() -> None:
    async with AsyncExitStack() as stack:
        channel = await Cluster(stack).start(lambda _: moved(), lambda _: damaged_record("it is gone"))
        with pytest.raises(grpc.aio.AioRpcError, match="is damaged") as error:
            await called(channel, GET_TRAINER, GetTrainerRequest(trainer_id="0" * 32).SerializeToString())
        assert error.value.code() is grpc.StatusCode.DATA_LOSS
