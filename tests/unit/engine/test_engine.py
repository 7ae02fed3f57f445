"""The engine without a server: what of a call runs, and on what."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.models.gated_models import WAIT_S, Gate, Gated
from tests.support.models.odd_models import Identity
from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.engine.engine import Engine
from trocar_server.engine.execute.eager import Eager
from trocar_server.engine.host.checked_plan import CheckedPlan
from trocar_server.engine.reply_cache import KeptReply, Question, ReplyCache
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.request.plan import (
    EditRequest,
    Execution,
    ImageInput,
    ImageSpec,
    Payload,
    Payloads,
    Plan,
    TapRequest,
    TensorInput,
)
from trocar_server.engine.run.bound_call import Prepared
from trocar_server.engine.run.call import Call, Keeping
from trocar_server.engine.run.extraction import Extraction
from trocar_server.engine.run.runner import PassCall, run_call
from trocar_server.engine.schedule.admission import MethodClass, PassThroughput, Reservation
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.engine.schedule.room import Room
from trocar_server.errors import ServiceError
from trocar_server.models import Catalogue, HostedModel, ModelSpec, ModelState
from trocar_server.processing.inputs import AudioInput, AudioSpec
from trocar_server.surgery import PassGuard, parse_selector
from trocar_server.tensors.edits import Edit, Zero


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


async def prepared(engine: Engine, wanted: Plan) -> Prepared:
    return await engine.preparation.prepare(await engine.checks.check(wanted), Payloads([rows(1, 2, 3)]))


async def test_a_plan_gives_its_values(engine: Engine) -> None:
    await engine.deployments.load("identity")
    result = await engine.extract(await prepared(engine, plan("identity")))
    values = result.feature_maps[0].values
    assert values is not None
    assert values.view(np.float32).tolist() == [1, 2, 3]


@pytest.mark.parametrize("model_id", ["identity", "nowhere"])
async def test_a_model_that_is_not_loaded_runs_nothing(engine: Engine, model_id: str) -> None:
    with pytest.raises(ServiceError) as caught:
        await engine.extract(await prepared(engine, plan(model_id)))
    assert caught.value.reason in (ErrorReason.MODEL_NOT_LOADED, ErrorReason.UNKNOWN_MODEL)


async def test_a_load_that_is_cancelled_can_be_made_again(engine: Engine) -> None:
    loading = asyncio.ensure_future(engine.deployments.load("resnet18"))
    await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert engine.catalogue.get("resnet18").state is ModelState.UNLOADED
    await engine.deployments.load("resnet18")
    assert engine.catalogue.get("resnet18").state is ModelState.LOADED


async def test_a_call_that_comes_while_its_model_is_unloaded_does_not_wait_forever(
    engine: Engine,
) -> None:
    """It was checked, then its images were decoded, and in between the model went."""
    await engine.deployments.load("identity")
    ready = await prepared(engine, plan("identity"))
    await engine.deployments.unload("identity")
    call = asyncio.ensure_future(engine.extract(ready))
    done, _ = await asyncio.wait([call], timeout=60)
    call.cancel()
    assert done
    with pytest.raises(ServiceError) as caught:
        call.result()
    assert caught.value.reason is ErrorReason.MODEL_NOT_LOADED


async def test_a_cancelled_call_gives_its_replica_back_when_its_pass_has_ended(
    engine: Engine, gate: Gate
) -> None:
    await engine.deployments.load("gated")
    gate.hold()
    call = asyncio.ensure_future(engine.extract(await prepared(engine, plan("gated", "last"))))
    await asyncio.to_thread(gate.entered.wait, WAIT_S)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert gate.left.is_set()
    assert engine.deployment("gated").pool.leased_count == 0


async def test_a_cancel_while_images_are_prepared_stops_before_the_next_image(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 images take the owner thread half a minute."""
    await engine.deployments.load("resnet18")
    deployment, guard, decoded = engine.deployment("resnet18"), PassGuard(), []

    def prepare(image: Image.Image) -> torch.Tensor:
        decoded.append(image)
        guard.cancel()
        return torch.zeros(3, 224, 224)

    monkeypatch.setattr(deployment.hosted.preprocessing, "_transform", prepare)
    images = [Image.new("RGB", (8, 8))] * 5
    image_input = ImageInput("", (ImageSpec(1),) * 5)
    wanted = Plan("resnet18", (TapRequest(parse_selector("fc")),), (image_input,), 1 << 20)
    payloads = [np.zeros(1, np.uint8)] * 5
    checked = CheckedPlan(wanted, deployment, engine.limits)
    async with deployment.pool.lease(None) as replica:
        call = PassCall(Prepared(checked, Payloads(payloads), [images]), guard, time.perf_counter())
        with pytest.raises(ServiceError) as caught:
            await engine.owner.run(lambda: run_call(Eager(replica), call))
    assert caught.value.reason is ErrorReason.CANCELLED
    assert len(decoded) == 1


def call_of(wanted: Plan, key: bytes | None) -> Call:
    async def receive(_: Reservation) -> list[Payload]:
        return [rows(1, 2, 3)]

    return Call(wanted, 12, receive, lambda _: nullcontext(), key=key)


async def served(engine: Engine, wanted: Plan, key: bytes | None) -> list[float]:
    with engine.admission.admit(MethodClass.EXTRACT, "alice") as reservation:
        answer = await engine.serve(call_of(wanted, key), reservation)
        assert isinstance(answer, Extraction)
        assert reservation.byte_count == answer.byte_count == 12
    values = answer.feature_maps[0].values
    assert values is not None
    found: list[float] = values.view(np.float32).tolist()
    return found


async def test_bytes_that_came_with_the_request_are_copied_once_there_is_room(engine: Engine) -> None:
    await engine.deployments.load("identity")
    copied: list[int] = []

    def arrived() -> list[Payload]:
        copied.append(reservation.byte_count)
        return [rows(1, 2, 3)]

    call = replace(call_of(plan("identity"), None), arrived=arrived)
    with engine.admission.admit(MethodClass.EXTRACT, "alice") as reservation:
        answer = await engine.serve(call, reservation)
        assert isinstance(answer, Extraction)
        assert copied == [24]  # inputs and reply
        assert reservation.byte_count == 12
    most = engine.limits.max_principal_bytes
    with engine.admission.admit(MethodClass.EXTRACT, "alice") as reservation:
        with pytest.raises(ServiceError) as caught:
            await engine.serve(replace(call, announced_bytes=most), reservation)
        assert caught.value.reason is ErrorReason.REQUEST_TOO_LARGE
        assert len(copied) == 1


@pytest.mark.parametrize(
    ("is_loaded", "reason"),
    [(False, ErrorReason.MODEL_NOT_LOADED), (True, ErrorReason.REQUEST_TOO_LARGE)],
)
async def test_sound_that_cannot_be_taken_is_refused_before_it_is_received(
    engine: Engine, reason: ErrorReason, *, is_loaded: bool
) -> None:
    if is_loaded:
        await engine.deployments.load("identity")
    received: list[Reservation] = []

    async def receive(reservation: Reservation) -> list[Payload]:
        received.append(reservation)
        return []

    byte_count = engine.limits.max_principal_bytes + 1
    clip = AudioInput("", (AudioSpec(byte_count, 16_000),), 0)
    sound = replace(plan("identity"), inputs=(), unprocessed=(clip,))
    call = replace(call_of(sound, None), receive=receive, announced_bytes=byte_count)
    with engine.admission.admit(MethodClass.EXTRACT, "alice") as reservation:
        with pytest.raises(ServiceError) as caught:
            await engine.serve(call, reservation)
        assert caught.value.reason is reason
        assert not received


async def test_a_cached_reply_takes_its_own_bytes_and_no_seconds(engine: Engine) -> None:
    engine.limits = engine.limits.model_copy(update={"feature_cache_bytes": 1 << 20})
    engine.replies = ReplyCache(1 << 20)
    await engine.deployments.load("identity")
    engine.deployment("identity").pool.throughput = pace = PassThroughput()
    for _ in range(10):
        pace.observe(1, 5.0)
    question = Question("alice", "identity", engine.deployment("identity").reply_version or "", b"")
    call = replace(call_of(plan("identity"), None), keeping=Keeping(question, lambda _: b"head"))
    for kind in (Extraction, KeptReply):
        with engine.admission.admit(MethodClass.EXTRACT, "alice") as reservation:
            answer = await engine.serve(call, reservation)
            assert isinstance(answer, kind)
            assert reservation.seconds == 0
            assert reservation.byte_count == answer.byte_count


async def test_a_plan_that_was_asked_before_is_checked_once_until_something_changes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.deployments.load("identity")
    checked, check = [], engine.checks.check

    async def counted(wanted: Plan, deadline: float | None = None) -> CheckedPlan:
        checked.append(wanted)
        return await check(wanted, deadline)

    monkeypatch.setattr(engine.checks, "check", counted)
    wanted = plan("identity")
    for count, key in ((1, b"a"), (1, b"a"), (2, b"b"), (3, None), (4, None), (4, b"a")):
        assert await served(engine, wanted, key) == [1, 2, 3]
        assert len(checked) == count
    assert await served(engine, plan("identity"), b"a") == [1, 2, 3]  # an equal plan, made anew
    assert len(checked) == 5
    engine.limits = engine.limits.model_copy()
    assert await served(engine, wanted, b"a") == [1, 2, 3]
    assert len(checked) == 6
    await engine.deployments.unload("identity")
    with pytest.raises(ServiceError) as caught:
        await served(engine, wanted, b"a")
    assert caught.value.reason is ErrorReason.MODEL_NOT_LOADED
    await engine.deployments.load("identity")
    assert await served(engine, wanted, b"a") == [1, 2, 3]
    assert len(checked) == 7


async def test_lower_limits_hold_for_a_plan_that_was_asked_before(engine: Engine) -> None:
    await engine.deployments.load("identity")
    wanted = plan("identity")
    assert await served(engine, wanted, b"a") == [1, 2, 3]
    engine.limits = engine.limits.model_copy(update={"max_reply_bytes": 8})
    with pytest.raises(ServiceError) as caught:
        await served(engine, wanted, b"a")
    assert caught.value.reason is ErrorReason.REPLY_TOO_LARGE


async def test_edits_that_are_to_be_stored_must_be_of_modules_that_run(engine: Engine) -> None:
    await engine.deployments.load("identity")
    await engine.checks.check_edits("identity", [EditRequest(parse_selector("/in"), Edit(Zero()))])
    with pytest.raises(ServiceError) as caught:
        await engine.checks.check_edits("identity", [EditRequest(parse_selector("fc"), Edit(Zero()))])
    assert caught.value.reason is ErrorReason.UNKNOWN_MODULE


async def test_texts_are_processed_again_for_a_model_that_was_loaded_meanwhile(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.deployments.load("identity")
    asked = []

    async def process(hosted: HostedModel, given: Plan, payloads: Payloads, *_: object) -> object:
        asked.append(hosted)
        if len(asked) == 1:
            await engine.deployments.unload("identity")
            await engine.deployments.load("identity")
        return given, payloads

    monkeypatch.setattr(engine.preparation, "process", process)
    await engine.process_inputs(plan("identity"), Payloads(()), None)
    assert len(asked) == 2
    assert asked[1] is engine.catalogue.loaded("identity")
    assert asked[0] is not asked[1]


async def test_arguments_for_a_model_that_was_replaced_meanwhile_are_not_counted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.deployments.load("identity")
    rounds = iter((100, 10))

    async def process(
        _hosted: HostedModel, given: Plan, payloads: Payloads, _deadline: None, room: Room
    ) -> object:
        if (byte_count := next(rounds)) == 100:
            await engine.deployments.unload("identity")
            await engine.deployments.load("identity")
        room.reserve(byte_count)
        return given, payloads

    monkeypatch.setattr(engine.preparation, "process", process)
    with engine.admission.admit(MethodClass.EXTRACT, "a") as reservation:
        reservation.reserve(7)
        await engine.process_inputs(plan("identity"), Payloads(()), None, Room(reservation))
        assert engine.admission.reserved()[0] == reservation.byte_count == 7 + 10


async def test_a_dropped_model_leaves_no_compiled_pass(engine: Engine) -> None:
    await engine.deployments.load("resnet18")
    of_images = replace(
        plan("resnet18", "avgpool", (1, 3, 64, 64)), execution=Execution(numerics=Numerics.FAST)
    )
    checked = await engine.checks.check(of_images)
    assert engine.compiled.find(checked) is not None
    await engine.deployments.unload("resnet18")
    assert engine.compiled.find(checked) is None  # by a call that was checked before
    assert not engine.compiled.variants()


async def test_checked_plans_go_with_the_prediction_that_a_pass_refuted(engine: Engine) -> None:
    await engine.deployments.load("identity")
    wanted, deployments = plan("identity"), engine.deployments
    checked = await engine.checks.check(wanted)
    deployments.keep_checked(b"key", checked)
    assert deployments.checked(b"key", wanted, engine.limits) is checked
    assert checked.signature is not None
    deployments["identity"].pass_differed(checked.signature)
    assert deployments.checked(b"key", wanted, engine.limits) is None
    deployments.keep_checked(b"key", checked)  # by a call that was checked before that
    assert deployments.checked(b"key", wanted, engine.limits) is None
    deployments.keep_checked(b"key", await engine.checks.check(wanted))
    assert deployments.checked(b"key", wanted, engine.limits) is not None
