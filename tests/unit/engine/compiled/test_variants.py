"""Compiled variants of an engine without a server: which calls may run on them, and what ends them."""

import asyncio
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.oracles.tape_graphs import TapeGraphs
from tests.unit.engine.compiled.variant_calls import (
    FAST,
    ROWS,
    SIDE,
    Photos,
    ask,
    out_of_memory,
    plan_of,
    prepared,
    ready,
    turns_of_the_loop,
    values,
)
from trocar_api.reasons import ErrorReason
from trocar_server.engine.compiled.requested_recipe import recipe_of
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
)
from trocar_server.engine.run.extraction import Extraction
from trocar_server.engine.run.runner import DeclinedError, ExecutorFailedError
from trocar_server.engine.status import status_of
from trocar_server.errors import ServiceError
from trocar_server.models import ModelSpec, make_hosted_copy
from trocar_server.surgery import parse_selector
from trocar_server.telemetry.labels import ModelLabels
from trocar_server.telemetry.snapshot import Replicas, ServerState
from trocar_server.tensors.edits import Edit, Set

IDS = np.array([[1, 2, 9, 4], [0, 7, 3, 5]])
PHOTOS = np.random.default_rng(0).standard_normal((2, 3, SIDE, SIDE)).astype(np.float32)


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


@pytest.mark.parametrize(("passes_that_fit", "groups"), [(1, [2, 2]), (2, [4])])
async def test_calls_whose_memory_adds_up_to_too_much_run_one_by_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, passes_that_fit: int, groups: list[int]
) -> None:
    variant = await ready(engine, ROWS[:2], "block", "whole")
    needed = (await engine.checks.check(plan_of(ROWS[:2], "block", FAST, "whole"))).memory_bytes
    engine.limits = engine.limits.model_copy(update={"max_pass_bytes": passes_that_fit * needed})
    monkeypatch.setattr(variant.queue, "_most_rows", lambda: 32)
    sizes = seen_rows(variant, monkeypatch)
    calls = [await prepared(engine, ROWS[i : i + 2], "block", model_id="whole") for i in (0, 2)]
    found = await asyncio.gather(*(engine.compiled.extract(variant, call, None, None) for call in calls))
    assert sizes == groups
    for maps, i in zip(found, (0, 2), strict=True):
        expected = values(await ask(engine, ROWS[i : i + 2], "block", Execution(), "whole"))
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
        return [DeclinedError()]

    monkeypatch.setattr(variant.queue, "_run", held)
    first = asyncio.create_task(ask(engine, ROWS[:2]))
    await begun.wait()
    late = await prepared(engine, ROWS[:2])
    with pytest.raises(ServiceError) as caught:
        await engine.extract(late, time.monotonic() + 0.01)
    assert caught.value.reason is ErrorReason.SERVER_BUSY
    released.set()
    assert (await first).report.engine == "eager"


async def ask_for_images(engine: Engine, count: int = 2, execution: Execution = FAST) -> Extraction:
    image = np.zeros((SIDE, SIDE, 3), np.uint8)
    images = ImageInput("", (ImageSpec(image.nbytes, SIDE, SIDE),) * count)
    taps = (TapRequest(parse_selector("conv")),)
    checked = await engine.checks.check(Plan("photos", taps, (images,), 1 << 20, execution=execution))
    payloads = Payloads([image.reshape(-1)] * count)
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


async def test_images_that_need_too_much_memory_are_refused_on_a_compiled_pass_too(engine: Engine) -> None:
    await engine.deployments.load("photos")
    for _ in range(3):
        await ask_for_images(engine)
        await engine.compiled.settled()
    engine.limits = engine.limits.model_copy(update={"max_pass_bytes": 5000})
    assert (await ask_for_images(engine)).report.engine == "torch"
    for execution in (Execution(), FAST):
        with pytest.raises(ServiceError) as caught:
            await ask_for_images(engine, 8, execution)
        assert caught.value.reason is ErrorReason.PASS_TOO_LARGE
    engine.preparation.stop()


# --- Modules that the process itself may train ----------------------------------------------------


async def host_own(engine: Engine, net: nn.Module) -> None:
    """Host a module as `connect("local")` does."""
    shape = (3, SIDE, SIDE)
    spec = ModelSpec("own", "local:module", input_shape=shape, factory=partial(make_hosted_copy, net))
    engine.catalogue.add(spec)
    await engine.deployments.load("own")


async def asked_for_own(engine: Engine) -> Extraction:
    """Ask until nothing changes any more, and return the last answer."""
    for _ in range(4):
        await ask(engine, PHOTOS, "conv", model_id="own")
        await engine.compiled.settled()
    return await ask(engine, PHOTOS, "conv", model_id="own")


async def test_their_passes_are_not_converted(engine: Engine) -> None:
    net = Photos()
    await host_own(engine, net)
    await asked_for_own(engine)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    found = await ask(engine, PHOTOS, "conv", model_id="own")
    assert not values(found)["value"].any()
    assert (found.report.numerics, found.report.asked) == (Numerics.EXACT, Numerics.FAST)
    assert "may change" in found.report.reason


async def test_their_recorded_passes_follow_the_weights(engine: Engine) -> None:
    graphs, net = TapeGraphs(), Photos()
    engine.compiled.builder.graphs_of = lambda _: graphs
    await host_own(engine, net)
    await asked_for_own(engine)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(-2.0)
    found = await ask(engine, PHOTOS, "conv", model_id="own")
    assert (found.report.engine, found.report.numerics) == ("cuda-graph", Numerics.EXACT)
    assert "may change" in found.report.reason
    np.testing.assert_array_equal(values(found)["value"], net(torch.from_numpy(PHOTOS)).detach().numpy())


# --- Passes that fail -----------------------------------------------------------------------------


async def test_inputs_that_a_model_rejects_do_not_end_its_compiled_pass(engine: Engine) -> None:
    await ready(engine, IDS, "fc", "words")
    for _ in range(5):
        with pytest.raises(ServiceError) as caught:
            await ask(engine, np.full((1, 4), 99), "fc", model_id="words")
        assert caught.value.reason is ErrorReason.INPUT_REJECTED
    assert (await ask(engine, IDS, "fc", model_id="words")).report.engine == "torch"


async def test_inputs_that_a_model_rejects_are_run_apart_from_those_of_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = await ready(engine, IDS, "fc", "words")
    monkeypatch.setattr(variant.queue, "_most_rows", lambda: 32)
    calls = [await prepared(engine, ids, "fc", model_id="words") for ids in (IDS, IDS + 99, IDS // 2)]
    extractions = [engine.compiled.extract(variant, call, None, None) for call in calls]
    first, bad, last = await asyncio.gather(*extractions, return_exceptions=True)
    assert isinstance(bad, ExecutorFailedError)
    for found, ids in ((first, IDS), (last, IDS // 2)):
        assert isinstance(found, Extraction)
        expected = values(await ask(engine, ids, "fc", Execution(), "words"))["value"]
        np.testing.assert_allclose(values(found)["value"], expected, rtol=1e-5, atol=1e-6)


async def test_a_pass_that_fails_three_times_in_a_row_where_eager_does_not_is_given_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = await ready(engine, ROWS, "block@-1")
    for count in (2, 2, 3):
        assert (await ask(engine, ROWS)).report.engine == "torch"
        with monkeypatch.context() as patched:
            patched.setattr(variant.runner, "run", Mock(side_effect=RuntimeError("broken")))
            found = [await ask(engine, ROWS) for _ in range(count)]
        assert {each.report.engine for each in found} == {"eager"}
        assert "failed on it" in found[0].report.reason
    assert variant.state is State.REFUSED
