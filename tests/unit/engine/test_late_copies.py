"""Replies whose bytes are on their way: who waits for them, and who does not."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.oracles.tape_graphs import TapeGraphs
from tests.support.oracles.transfer_devices import WAIT_S, LateBackend, late_transfers
from trocar_server.config import EngineConfig, Limits
from trocar_server.engine.engine import Engine
from trocar_server.engine.request.plan import Payload, Payloads, Plan, TapRequest, TensorInput
from trocar_server.engine.run.extraction import Extraction
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.engine.transfer import Copies, this_thread
from trocar_server.models import Catalogue, ModelSpec
from trocar_server.surgery import parse_selector

ROWS, MOST_BYTES = 4, 64 * (1 << 16)
"""Room enough that replies just dropped, but not yet freed, leave some for those that follow."""


class Doubling(nn.Module):
    """What comes out is told from what goes in without running it."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.keep(x + x)
        return found


@pytest.fixture
def backend() -> LateBackend:
    return LateBackend(is_held=True)


@pytest.fixture
async def engine(tmp_path: Path, backend: LateBackend) -> AsyncIterator[Engine]:
    catalogue = Catalogue()
    factory = f"{Doubling.__module__}:{Doubling.__qualname__}"
    catalogue.add(ModelSpec("doubling", factory, "random:0", input_shape=(3,)))
    owner = DeviceThread(torch.device("cpu"), None, lambda _: late_transfers(backend, MOST_BYTES))
    owner.start()
    config = EngineConfig(compile_after=1, min_gain=0.0)
    found = Engine(catalogue, owner, Limits(), tmp_path, config=config)
    await found.deployments.load("doubling")
    yield found
    backend.is_held = False
    await asyncio.to_thread(owner.stop)


async def asked(engine: Engine, number: float) -> Extraction:
    inputs = TensorInput("", torch.float32, (ROWS, 3))
    plan = Plan("doubling", (TapRequest(parse_selector("keep")),), (inputs,), 1 << 20)
    checked = await engine.checks.check(plan)
    payload: Payload = np.full((ROWS, 3), number, np.float32).reshape(-1).view(np.uint8)
    return await engine.extract(await engine.preparation.prepare(checked, Payloads([payload])))


def values_of(extraction: Extraction) -> list[float]:
    values = extraction.feature_maps[0].values
    assert values is not None
    return sorted(set(values.view(np.float32).tolist()))


async def begun(backend: LateBackend, count: int) -> None:
    await asyncio.to_thread(backend.until_begun, count)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_next_pass_of_the_only_replica_runs_while_bytes_are_on_their_way(
    engine: Engine, backend: LateBackend
) -> None:
    calls = [asyncio.ensure_future(asked(engine, number)) for number in (1, 2, 3)]
    await begun(backend, 3)
    await turns()
    assert not any(call.done() for call in calls)
    assert await engine.owner.run(lambda: "free") == "free"
    backend.finish(3)
    assert [values_of(await call) for call in calls] == [[2], [4], [6]]


async def test_a_reply_is_there_when_its_own_bytes_are(engine: Engine, backend: LateBackend) -> None:
    calls = []
    for number in (1, 2):
        calls.append(asyncio.ensure_future(asked(engine, number)))
        await begun(backend, number)
    backend.finish()
    assert values_of(await asyncio.wait_for(calls[0], WAIT_S)) == [2]
    await turns()
    assert not calls[1].done()
    backend.finish()
    assert values_of(await calls[1]) == [4]


async def test_replies_of_recorded_passes_wait_for_their_bytes_too(
    engine: Engine, backend: LateBackend
) -> None:
    backend.is_held, graphs = False, TapeGraphs()
    engine.compiled.builder.graphs_of = lambda _: graphs
    for number in range(6):
        await asked(engine, number)
        await engine.compiled.settled()
    backend.is_held, before = True, backend.begun_count
    calls = [asyncio.ensure_future(asked(engine, number)) for number in (1, 2, 3)]
    await begun(backend, before + 3)
    await engine.owner.run(lambda: None)  # told after the groups before it
    await turns()
    assert not any(call.done() for call in calls)
    backend.finish(3)
    replies = [await call for call in calls]
    assert [values_of(reply) for reply in replies] == [[2], [4], [6]]
    assert {reply.report.engine for reply in replies} == {"cuda-graph"}


async def test_an_error_of_a_copy_reaches_its_caller_alone(engine: Engine, backend: LateBackend) -> None:
    calls = []
    for number in (1, 2):
        calls.append(asyncio.ensure_future(asked(engine, number)))
        await begun(backend, number)
    backend.finish(error=RuntimeError("the device is gone"))
    backend.finish()
    with pytest.raises(RuntimeError, match="the device is gone"):
        await calls[0]
    assert values_of(await calls[1]) == [4]


async def test_a_caller_who_goes_leaves_a_piece_that_nobody_gets_before_its_copy_is_done(
    engine: Engine, backend: LateBackend
) -> None:
    gone = asyncio.ensure_future(asked(engine, 1))
    await begun(backend, 1)
    await turns()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    del gone
    kept = asyncio.ensure_future(asked(engine, 2))
    await begun(backend, 2)
    backend.finish(2)
    assert values_of(await kept) == [4]
    backend.is_held = False
    for number in range(3, 9):
        assert values_of(await asked(engine, number)) == [2 * number]
    assert len(backend.allocated) < 8  # nine without using any again


async def test_a_piece_is_not_used_again_while_a_reply_is_held(engine: Engine, backend: LateBackend) -> None:
    backend.is_held = False
    held = [await asked(engine, number) for number in range(1, 90)]
    assert [values_of(reply) for reply in held] == [[2 * number] for number in range(1, 90)]
    assert sum(backend.allocated) <= MOST_BYTES
    held.clear()
    assert values_of(await asked(engine, 9)) == [18]
    assert sum(backend.allocated) <= MOST_BYTES


async def test_copies_that_work_does_not_take_are_done_when_it_is(
    engine: Engine, backend: LateBackend
) -> None:
    running = asyncio.ensure_future(engine.owner.run(lambda: this_thread.transfers.to_host(torch.ones(5))))
    await begun(backend, 1)
    await turns()
    assert not running.done()
    backend.finish()
    assert (await running).view(np.float32).tolist() == [1.0] * 5


async def test_an_error_of_copies_that_work_does_not_take_is_its_own(
    engine: Engine, backend: LateBackend
) -> None:
    running = asyncio.ensure_future(engine.owner.run(lambda: this_thread.transfers.to_host(torch.ones(5))))
    await begun(backend, 1)
    backend.finish(error=RuntimeError("the device is gone"))
    with pytest.raises(RuntimeError, match="the device is gone"):
        await running
    assert await engine.owner.run(lambda: "free") == "free"


async def test_work_that_fails_has_its_own_error_and_leaves_no_copies_to_the_next(
    engine: Engine, backend: LateBackend
) -> None:
    def fail() -> None:
        this_thread.transfers.to_host(torch.ones(5))
        raise ValueError("no")

    running = asyncio.ensure_future(engine.owner.run(fail))
    await begun(backend, 1)
    backend.finish(error=RuntimeError("the device is gone"))
    with pytest.raises(ValueError, match="no"):
        await running
    assert await engine.owner.run(_taken) is None


def _taken() -> Copies | None:
    return this_thread.transfers.take()


async def test_the_thread_ends_when_all_bytes_have_come(engine: Engine, backend: LateBackend) -> None:
    call = asyncio.ensure_future(asked(engine, 1))
    await begun(backend, 1)
    ending = asyncio.ensure_future(asyncio.to_thread(engine.owner.stop))
    await turns()
    assert not ending.done()
    backend.finish()
    await asyncio.wait_for(ending, WAIT_S)
    assert values_of(await call) == [2]
