"""The engine without a server: what of a call runs, and on what."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.gated_models import WAIT_S, Gate, Gated
from tests.support.odd_models import Identity
from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.edits import Edit, Zero
from trocar_server.engine.device import DeviceThread
from trocar_server.engine.engine import Engine
from trocar_server.engine.plan import (
    EditRequest,
    ImageForm,
    ImageInput,
    Payload,
    Payloads,
    Plan,
    TapRequest,
    TensorInput,
)
from trocar_server.engine.work import Prepared, run_plan
from trocar_server.errors import ServiceError
from trocar_server.models import Catalogue, ModelSpec, ModelState
from trocar_server.surgery import PassGuard, parse_selector


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    catalogue = Catalogue()
    for model_id, kind in (("identity", Identity), ("gated", Gated)):
        factory = f"{kind.__module__}:{kind.__qualname__}"
        catalogue.add(ModelSpec(model_id, factory, "random:0", input_shape=(3,)))
    catalogue.add(ModelSpec("resnet18", "resnet18", "random:0"))
    owner = DeviceThread(torch.device("cpu"))
    owner.start()
    yield Engine(catalogue, owner, Limits(), tmp_path)
    await asyncio.to_thread(owner.stop)


def rows(*values: float) -> Payload:
    return np.array(values, np.float32).view(np.uint8)


def plan(model_id: str, selector: str = "/out", shape: tuple[int, ...] = (1, 3)) -> Plan:
    return Plan(
        model_id, (TapRequest(parse_selector(selector)),), (TensorInput("", torch.float32, shape),), 1 << 20
    )


async def test_a_plan_gives_its_values(engine: Engine) -> None:
    await engine.load("identity")
    result = await engine.extract(await engine.prepare(plan("identity"), Payloads([rows(1, 2, 3)])))
    values = result.feature_maps[0].values
    assert values is not None
    assert values.view(np.float32).tolist() == [1, 2, 3]


@pytest.mark.parametrize("model_id", ["identity", "nowhere"])
async def test_a_model_that_is_not_loaded_runs_nothing(engine: Engine, model_id: str) -> None:
    with pytest.raises(ServiceError) as caught:
        await engine.extract(await engine.prepare(plan(model_id), Payloads([rows(1, 2, 3)])))
    assert caught.value.reason in (ErrorReason.MODEL_NOT_LOADED, ErrorReason.UNKNOWN_MODEL)


async def test_a_load_that_is_cancelled_can_be_made_again(engine: Engine) -> None:
    loading = asyncio.ensure_future(engine.load("resnet18"))
    await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert engine.catalogue.get("resnet18").state is ModelState.UNLOADED
    await engine.load("resnet18")
    assert engine.catalogue.get("resnet18").state is ModelState.LOADED


async def test_a_call_that_comes_while_its_model_is_unloaded_does_not_wait_forever(
    engine: Engine,
) -> None:
    """It was checked, then its images were decoded, and in between the model went."""
    await engine.load("identity")
    prepared = await engine.prepare(plan("identity"), Payloads([rows(1, 2, 3)]))
    await engine.unload("identity")
    call = asyncio.ensure_future(engine.extract(prepared))
    done, _ = await asyncio.wait([call], timeout=5)
    call.cancel()
    assert done
    with pytest.raises(ServiceError) as caught:
        call.result()
    assert caught.value.reason is ErrorReason.MODEL_NOT_LOADED


async def test_a_cancelled_call_gives_its_replica_back_when_its_pass_has_ended(
    engine: Engine, gate: Gate
) -> None:
    await engine.load("gated")
    gate.hold()
    call = asyncio.ensure_future(
        engine.extract(await engine.prepare(plan("gated", "last"), Payloads([rows(1, 2, 3)])))
    )
    await asyncio.to_thread(gate.entered.wait, WAIT_S)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert gate.left.is_set()
    assert engine._hosts["gated"].pool.leased_count == 0


async def test_a_cancel_while_images_are_prepared_stops_before_the_next_image(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 images take the owner thread half a minute."""
    await engine.load("resnet18")
    host, guard, prepared = engine._hosts["resnet18"], PassGuard(), []

    def prepare(image: Image.Image) -> torch.Tensor:
        prepared.append(image)
        guard.cancel()
        return torch.zeros(3, 224, 224)

    monkeypatch.setattr(host.hosted.preprocessing, "_transform", prepare)
    images = [Image.new("RGB", (8, 8))] * 5
    forms = ImageInput("", (ImageForm(1),) * 5)
    wanted = Plan("resnet18", (TapRequest(parse_selector("fc")),), (forms,), 1 << 20)
    payloads = [np.zeros(1, np.uint8)] * 5
    async with host.pool.lease(None) as replica:
        with pytest.raises(ServiceError) as caught:
            await engine.owner.run(
                lambda: run_plan(
                    host, replica, Prepared(wanted, Payloads(payloads), [images]), guard, engine.limits
                )
            )
    assert caught.value.reason is ErrorReason.CANCELLED
    assert len(prepared) == 1


async def test_edits_that_are_to_be_stored_must_be_of_modules_that_run(engine: Engine) -> None:
    await engine.load("identity")
    await engine.checks.check_edits("identity", [EditRequest(parse_selector("/in"), Edit(Zero()))])
    with pytest.raises(ServiceError) as caught:
        await engine.checks.check_edits("identity", [EditRequest(parse_selector("fc"), Edit(Zero()))])
    assert caught.value.reason is ErrorReason.UNKNOWN_MODULE
