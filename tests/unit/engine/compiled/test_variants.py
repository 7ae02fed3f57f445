"""Compiled variants of an engine without a server: which calls may run on them, and what ends them."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.config import EngineConfig, Limits
from trocar_server.engine.compiled import variant_trial
from trocar_server.engine.compiled.backends.build_worker import Built, Job
from trocar_server.engine.compiled.compiled_pass import NotCompiledError, recipe_of
from trocar_server.engine.compiled.variant import State, Variant
from trocar_server.engine.engine import Engine
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.request.plan import (
    EditRequest,
    Execution,
    ImageInput,
    ImageSpec,
    Payloads,
    Plan,
    TapRequest,
    TensorInput,
)
from trocar_server.engine.run.extraction import Extraction
from trocar_server.engine.run.run_plan import Prepared
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.engine.status import status_of
from trocar_server.errors import ServiceError
from trocar_server.models import Catalogue, ModelSpec, PreprocessingSpec
from trocar_server.surgery import parse_selector
from trocar_server.telemetry.labels import ModelLabels
from trocar_server.telemetry.snapshot import Replicas, ServerState
from trocar_server.tensors.edits import Edit, Set

SIDE = 8
FAST = Execution(Numerics.FAST)
ROWS = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)


class Chunks(nn.Module):
    """Calls its block for four samples at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.block(part) for part in x.split(4)])


class Photos(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.conv(x)
        return found


class Shifts(Chunks):
    """Writes to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.block(x.sub_(1.0))
        return found


class TokensFirst(Chunks):
    """Its block sees four tokens before the samples, as `nn.TransformerEncoder` does by default."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.block(x.transpose(0, 1))
        return found.transpose(0, 1)


async def _nothing_built(_: Job) -> Built:
    return Built()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    catalogue = Catalogue()
    for kind, shape in ((Chunks, (3,)), (Photos, (3, SIDE, SIDE)), (Shifts, (3,)), (TokensFirst, (4, 3))):
        factory = f"{kind.__module__}:{kind.__qualname__}"
        rules = PreprocessingSpec(resize=(SIDE,), crop=(SIDE,)) if kind is Photos else None
        catalogue.add(
            ModelSpec(kind.__name__.lower(), factory, "random:0", input_shape=shape, preprocessing=rules)
        )
    owner = DeviceThread(torch.device("cpu"))
    owner.start()
    config = EngineConfig(compile_after=1, min_gain=0.0, openvino=False)
    found = Engine(catalogue, owner, Limits(), tmp_path, config=config)
    found.compiled.builder.build_apart = _nothing_built
    yield found
    await asyncio.to_thread(owner.stop)


def plan_of(inputs: np.ndarray[Any, Any], tap: str, execution: Execution, model_id: str) -> Plan:
    given = TensorInput("", torch.float32, inputs.shape)
    taps = (TapRequest(parse_selector(tap), alias="" if "*" in tap else "value"),)
    return Plan(model_id, taps, (given,), 1 << 20, execution=execution)


async def ask(
    engine: Engine,
    inputs: np.ndarray[Any, Any],
    tap: str = "block@-1",
    execution: Execution = FAST,
    model_id: str = "chunks",
) -> Extraction:
    return await engine.extract(await prepared(engine, inputs, tap, execution, model_id))


async def prepared(
    engine: Engine,
    inputs: np.ndarray[Any, Any],
    tap: str = "block@-1",
    execution: Execution = FAST,
    model_id: str = "chunks",
) -> Prepared:
    checked = await engine.checks.check(plan_of(inputs, tap, execution, model_id))
    return await engine.preparation.prepare(checked, Payloads([inputs.copy().reshape(-1).view(np.uint8)]))


def values(found: Extraction) -> dict[str, np.ndarray[Any, Any]]:
    maps = ((entry.output, entry.values) for entry in found.feature_maps)
    return {
        output.name: data.view(np.float32).reshape(output.shape) for output, data in maps if data is not None
    }


async def ready(engine: Engine, inputs: np.ndarray[Any, Any], tap: str, model_id: str = "chunks") -> Variant:
    """Ask until the variant for these calls is in use."""
    if model_id not in engine.deployments:
        await engine.deployments.load(model_id)
    for _ in range(4):
        await ask(engine, inputs, tap, model_id=model_id)
        await engine.compiled.settled()
    (variant,) = engine.compiled.variants()
    assert variant.is_ready
    return variant


async def turns_of_the_loop() -> None:
    """Let every task go on as far as it can without the device."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_an_unload_serves_the_calls_that_run_on_or_wait_for_a_compiled_pass(engine: Engine) -> None:
    variant = await ready(engine, ROWS[:4], "block@-1")
    calls = [await prepared(engine, ROWS[:4]) for _ in range(2)]
    expected = values(await engine.extract(calls[0]))["value"]
    go_on = threading.Event()
    blocking = asyncio.create_task(engine.owner.run(go_on.wait))
    asked = [asyncio.create_task(engine.extract(call)) for call in calls]
    await turns_of_the_loop()
    waiting = variant.queue.waiting_count
    unloading = asyncio.create_task(engine.deployments.unload("chunks"))
    await turns_of_the_loop()
    is_early = unloading.done()
    go_on.set()
    await unloading
    assert (waiting, is_early) == (1, False)  # the other call's group waits for the device
    assert all(task.done() for task in asked)
    for task in asked:
        np.testing.assert_allclose(values(await task)["value"], expected, rtol=1e-5)
    assert await blocking


@pytest.mark.parametrize(("built_for", "called_with"), [(4, 8), (8, 4)])
@pytest.mark.parametrize("tap", ["block@-1", "block@*"])
async def test_a_batch_that_calls_other_modules_does_not_run_on_the_variant(
    engine: Engine, built_for: int, called_with: int, tap: str
) -> None:
    variant = await ready(engine, ROWS[:built_for], tap)
    inputs = ROWS[:called_with]
    found = await ask(engine, inputs, tap)
    expected = values(await ask(engine, inputs, tap, Execution(Numerics.EXACT)))
    last = next(reversed(list(values(found).values())))
    block = engine.deployments["chunks"].hosted.module.block
    assert isinstance(block, nn.Module)
    np.testing.assert_allclose(last, block(torch.from_numpy(inputs[-4:])).detach().numpy(), rtol=1e-5)
    assert values(found).keys() == expected.keys()
    assert found.report.engine == "eager"
    assert "does not fit" in found.report.reason
    await engine.compiled.settled()
    assert variant.is_ready
    assert (await ask(engine, ROWS[:built_for], tap)).report.engine == "torch"


async def test_a_variant_is_tried_on_a_batch_that_it_was_built_for(engine: Engine) -> None:
    await engine.deployments.load("chunks")
    for count in (8, 4, 4, 8):  # built for the first; the next two cannot be its trial
        await ask(engine, ROWS[:count])
        await engine.compiled.settled()
    (variant,) = engine.compiled.variants()
    assert variant.problems == []
    assert variant.is_ready


async def test_a_variant_is_compared_again_on_a_call_that_ran_on_it(engine: Engine) -> None:
    variant = await ready(engine, ROWS, "block@-1")
    variant.is_proven = False  # as after a restart: the next group is compared with eager
    await ask(engine, ROWS[:4])
    await engine.compiled.settled()
    assert variant.is_ready


def seen_rows(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the rows of each later run of a variant, as they come."""
    seen: list[int] = []
    runner = variant.runner
    assert runner is not None
    run = runner.run

    def noted(given: Any, *others: Any) -> Any:
        seen.append(given[0].shape[0])
        return run(given, *others)

    monkeypatch.setattr(runner, "run", noted)
    return seen


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture(params=["the queue is full", "the model is unloaded"])
async def without_replica(
    request: pytest.FixtureRequest, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Variant, Prepared]]:
    """A variant in use and one of its calls, while no trial can have a replica."""
    variant, call = await ready(engine, ROWS, "block@-1"), await prepared(engine, ROWS)
    pool = variant.deployment.pool
    if request.param == "the model is unloaded":
        await pool.drain()
        yield variant, call
        return
    monkeypatch.setattr(pool, "_max_queue", 0)
    async with pool.lease(None):
        yield variant, call


async def test_a_comparison_without_a_replica_proves_nothing(
    engine: Engine, without_replica: tuple[Variant, Prepared]
) -> None:
    variant, call = without_replica
    await engine.compiled.builder.check_again(variant, call)
    assert variant.is_ready


async def test_a_trial_without_a_replica_is_left_to_a_later_call(
    engine: Engine, without_replica: tuple[Variant, Prepared]
) -> None:
    variant, call = without_replica
    variant.state = State.TRYING
    await engine.compiled.builder.attempt(variant, call)
    assert (variant.state, variant.problems) == (State.CANDIDATE, [])
    await engine.compiled.builder.warm(variant)
    assert (variant.state, variant.problems) == (State.CANDIDATE, [])


async def test_a_kept_variant_that_finds_no_replica_stays_on_disk(
    engine: Engine,
    without_replica: tuple[Variant, Prepared],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    variant, builder, store = without_replica[0], engine.compiled.builder, Mock()
    way = next(builder._candidates(variant, tmp_path))
    record = Mock(key="key", engine=way.engine, numerics=way.numerics, built=Built())
    monkeypatch.setattr(builder, "_store", store)
    await builder.restore(variant, Mock(record=record, folder=tmp_path))
    assert variant.state is State.COUNTING
    store.remove.assert_not_called()


async def test_a_group_without_memory_runs_eagerly_and_the_variant_stays(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = await ready(engine, ROWS, "block@-1")
    with monkeypatch.context() as patched:
        patched.setattr(variant.runner, "run", out_of_memory)
        found = await ask(engine, ROWS)
        await engine.compiled.settled()
    assert found.report.engine == "eager"
    assert (await ask(engine, ROWS)).report.engine == "torch"


async def test_a_comparison_without_memory_proves_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = await ready(engine, ROWS, "block@-1")
    variant.is_proven = False
    monkeypatch.setattr(variant_trial, "_fastest", out_of_memory)
    await ask(engine, ROWS)
    await engine.compiled.settled()
    assert variant.is_ready


@pytest.mark.parametrize(("passes_that_fit", "groups"), [(1, [2, 2]), (2, [4])])
async def test_calls_whose_memory_adds_up_to_too_much_run_one_by_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, passes_that_fit: int, groups: list[int]
) -> None:
    variant = await ready(engine, ROWS[:2], "block@-1")
    needed = (await engine.checks.check(plan_of(ROWS[:2], "block@-1", FAST, "chunks"))).memory_bytes
    engine.limits = engine.limits.model_copy(update={"max_pass_bytes": passes_that_fit * needed})
    monkeypatch.setattr(variant.queue, "_most_rows", lambda: 32)
    sizes = seen_rows(variant, monkeypatch)
    calls = [await prepared(engine, ROWS[i : i + 2]) for i in (0, 2)]
    found = await asyncio.gather(*(engine.compiled.extract(variant, call, None, None) for call in calls))
    assert sizes == groups
    for maps, i in zip(found, (0, 2), strict=True):
        expected = values(await ask(engine, ROWS[i : i + 2], execution=Execution()))
        np.testing.assert_allclose(values(maps)["value"], expected["value"], rtol=1e-5)


@pytest.mark.parametrize("counts", [(2, 2), (1, 3), (4, 4), (1, 1, 2)])
async def test_values_with_another_dimension_first_are_never_cut_into_samples(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    """Four tokens may be as many as the rows of one call, or of a group."""
    inputs = np.random.default_rng(0).standard_normal((8, 4, 3)).astype(np.float32)
    variant = await ready(engine, inputs[:1], "block", "tokensfirst")
    monkeypatch.setattr(variant.queue, "_most_rows", lambda: 32)
    calls = [await prepared(engine, inputs[-count:], "block", model_id="tokensfirst") for count in counts]
    found = await asyncio.gather(*(engine.compiled.extract(variant, call, None, None) for call in calls))
    block = engine.deployments["tokensfirst"].hosted.module.block
    assert isinstance(block, nn.Module)
    for maps, count in zip(found, counts, strict=True):
        expected = block(torch.from_numpy(inputs[-count:]).transpose(0, 1)).detach().numpy()
        assert values(maps)["value"].shape == (4, count, 3)
        np.testing.assert_allclose(values(maps)["value"], expected, rtol=1e-5, atol=1e-6)


async def test_a_batch_whose_double_is_as_long_as_the_tokens_does_not_reject_a_variant(
    engine: Engine,
) -> None:
    inputs = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32)
    variant = await ready(engine, inputs, "block", "tokensfirst")
    assert variant.problems == []


async def test_a_compiled_pass_that_breaks_leaves_the_inputs_to_the_eager_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = await ready(engine, ROWS, "block", "shifts")
    runner = variant.runner
    assert runner is not None
    run = runner.run

    def broken(given: Any, *others: Any) -> Any:
        run(given, *others)
        raise MemoryError

    monkeypatch.setattr(runner, "run", broken)
    found = values(await ask(engine, ROWS, "block", model_id="shifts"))["value"]
    block = engine.deployments["shifts"].hosted.module.block
    assert isinstance(block, nn.Module)
    expected = block(torch.from_numpy(ROWS - 1)).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("max_bytes", [24, 1024])
async def test_a_changed_limit_of_replies_holds_for_compiled_passes(engine: Engine, max_bytes: int) -> None:
    engine.limits = engine.limits.model_copy(update={"max_reply_bytes": 48})
    await ready(engine, ROWS[:4], "block", "shifts")
    engine.limits = engine.limits.model_copy(update={"max_reply_bytes": max_bytes})
    if max_bytes < 48:
        with pytest.raises(ServiceError, match="the limit is 24"):
            await ask(engine, ROWS[:4], "block", model_id="shifts")
        return
    assert (await ask(engine, ROWS, "block", model_id="shifts")).report.engine == "torch"


async def test_calls_on_a_compiled_variant_are_in_the_status(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variant, begun, released = await ready(engine, ROWS[:2], "block@-1"), asyncio.Event(), asyncio.Event()

    async def held(calls: Any) -> Any:
        begun.set()
        await released.wait()
        return await engine.compiled._run(variant, calls)

    monkeypatch.setattr(variant.queue, "_run", held)
    calls = [asyncio.create_task(ask(engine, ROWS[:2]))]
    await begun.wait()
    others = [await prepared(engine, ROWS[:2]) for _ in range(2)]
    calls += [asyncio.create_task(engine.extract(other)) for other in others]
    await asyncio.sleep(0)
    found = status_of(engine)
    (queue,) = found.queues
    assert (queue.replica_count, queue.leased_count, queue.waiting_count) == (1, 1, 2)
    assert queue.pending_s > 0
    assert found.total.waiting_count == 2
    state = ServerState(engine, Mock(all=list), tmp_path, ModelLabels(str))
    (replicas,) = state.read().replicas.values()
    assert replicas == Replicas(count=1, leased=1, waiting=2)
    released.set()
    assert [found.report.engine for found in await asyncio.gather(*calls)] == ["torch"] * 3


async def test_a_call_that_cannot_wait_for_a_compiled_pass_is_refused_as_busy(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, begun, released = await ready(engine, ROWS[:2], "block@-1"), asyncio.Event(), asyncio.Event()

    async def held(_: Any) -> Any:
        begun.set()
        await released.wait()
        return [NotCompiledError()]

    monkeypatch.setattr(variant.queue, "_run", held)
    first = asyncio.create_task(ask(engine, ROWS[:2]))
    await begun.wait()
    late = await prepared(engine, ROWS[:2])
    with pytest.raises(ServiceError) as caught:
        await engine.extract(late, time.monotonic() + 0.01)
    assert caught.value.reason is ErrorReason.SERVER_BUSY
    released.set()
    assert (await first).report.engine == "eager"


async def ask_for_images(engine: Engine) -> Extraction:
    image = np.zeros((SIDE, SIDE, 3), np.uint8)
    images = ImageInput("", (ImageSpec(image.nbytes, SIDE, SIDE),) * 2)
    taps = (TapRequest(parse_selector("conv")),)
    checked = await engine.checks.check(Plan("photos", taps, (images,), 1 << 20, execution=FAST))
    payloads = Payloads([image.reshape(-1), image.reshape(-1)])
    return await engine.extract(await engine.preparation.prepare(checked, payloads))


async def test_requests_of_images_become_compiled(engine: Engine) -> None:
    await engine.deployments.load("photos")
    first = await ask_for_images(engine)
    assert "no pass with a batch of such shapes has run yet" in first.report.reason
    for _ in range(3):
        await ask_for_images(engine)
        await engine.compiled.settled()
    assert (await ask_for_images(engine)).report.engine == "torch"
    engine.preparation.stop()


async def test_edits_that_set_a_negative_zero_are_other_values_to_compute(engine: Engine) -> None:
    """Of a CUDA graph each would otherwise replay the other's."""
    await engine.deployments.load("chunks")
    recipes = []
    for zero in (0.0, -0.0):
        edits = (EditRequest(parse_selector("block"), Edit(Set(zero))),)
        checked = await engine.checks.check(replace(plan_of(ROWS[:2], "block", FAST, "chunks"), edits=edits))
        assert checked.resolved is not None
        recipes.append(recipe_of(checked.plan, checked.resolved, ()))
    assert len({*recipes, recipes[0]}) == 2
