"""The server's own first passes: each model once, and none of them anybody's trouble."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from tests.support.models.odd_models import Identity
from tests.support.models.tiny_models import Structured
from trocar_server.app.warm_up import warm_up
from trocar_server.config import Limits
from trocar_server.engine.engine import Engine
from trocar_server.engine.request.plan import Plan
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.models import Catalogue, ModelSpec


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    catalogue = Catalogue()
    for model_id, kind in (("a", Structured), ("b", Identity), ("unloaded", Identity)):
        factory = f"{kind.__module__}:{kind.__qualname__}"
        catalogue.add(ModelSpec(model_id, factory, "random:0", input_shape=(3,)))
    owner = DeviceThread(torch.device("cpu"))
    owner.start()
    engine = Engine(catalogue, owner, Limits(), tmp_path)
    await engine.deployments.load("a")
    await engine.deployments.load("b")
    yield engine
    await asyncio.to_thread(owner.stop)


async def test_each_loaded_model_runs_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    extract = engine.extract

    async def watched(prepared: object, deadline: float | None = None) -> object:
        plans.append(prepared.plan)  # type: ignore[attr-defined]
        return await extract(prepared, deadline)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "extract", watched)
    await warm_up(engine)
    assert [plan.model_id for plan in plans] == ["a", "b"]
    assert all(entry.shape[1:] == (3,) for plan in plans for entry in plan.inputs)  # type: ignore[union-attr]


async def test_a_model_that_fails_holds_up_no_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def failing(prepared: object) -> None:
        asked.append(prepared.plan.model_id)  # type: ignore[attr-defined]
        raise RuntimeError("no")

    monkeypatch.setattr(engine, "extract", failing)
    await warm_up(engine)
    assert asked == ["a", "b"]
