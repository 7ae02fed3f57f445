"""Trials of compiled variants: what rejects one, and what only puts it off."""

from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.unit.engine.compiled.variant_calls import ROWS, ask, out_of_memory, prepared, ready
from trocar_server.engine.compiled import variant_building, variant_trial
from trocar_server.engine.compiled.backends.build_worker import Built
from trocar_server.engine.compiled.variant import State, Variant
from trocar_server.engine.engine import Engine
from trocar_server.engine.run.bound_call import Prepared


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
    variant = without_replica[0]
    store = await restored(engine, variant, monkeypatch, tmp_path)
    assert variant.state is State.COUNTING
    store.remove.assert_not_called()


async def restored(engine: Engine, variant: Variant, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Mock:
    """Restore a variant as if its record was on disk; return the store."""
    builder, store = engine.compiled.builder, Mock()
    way = next(builder._candidates(variant, folder))
    record = Mock(key="key", engine=way.engine, numerics=way.numerics, built=Built())
    monkeypatch.setattr(builder, "_store", store)
    await builder.restore(variant, Mock(record=record, folder=folder))
    return store


async def test_a_comparison_without_memory_proves_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = await ready(engine, ROWS, "block@-1")
    variant.is_proven = False
    monkeypatch.setattr(variant_trial, "_fastest", out_of_memory)
    await ask(engine, ROWS)
    await engine.compiled.settled()
    assert variant.is_ready


async def test_a_trial_without_memory_is_left_to_a_later_call(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.deployments.load("chunks")
    with monkeypatch.context() as patched:
        patched.setattr(variant_trial, "_fastest", out_of_memory)
        await asked(engine, 3)  # one to build it, two trials
    (variant,) = engine.compiled.variants()
    assert (variant.state, variant.problems) == (State.CANDIDATE, [])
    await asked(engine, 1)
    assert variant.is_ready


async def test_a_third_trial_without_memory_rejects_a_candidate(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.deployments.load("chunks")
    monkeypatch.setattr(variant_trial, "_fastest", out_of_memory)
    await asked(engine, 4)
    (variant,) = engine.compiled.variants()
    assert variant.state is State.REFUSED
    assert "too little memory" in variant.problems[0]


@pytest.mark.parametrize("lacks", ["the trial", "the weights"])
async def test_a_kept_variant_without_memory_for_its_trial_stays_on_disk(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacks: str
) -> None:
    variant = await ready(engine, ROWS, "block@-1")
    if lacks == "the trial":
        monkeypatch.setattr(variant_trial, "_fastest", out_of_memory)
    else:
        monkeypatch.setattr(variant_building, "make_replica", out_of_memory)
    store = await restored(engine, variant, monkeypatch, tmp_path)
    assert variant.state is State.COUNTING
    store.remove.assert_not_called()


async def asked(engine: Engine, count: int) -> None:
    """Ask several times, each after what the last one has begun."""
    for _ in range(count):
        await ask(engine, ROWS)
        await engine.compiled.settled()
