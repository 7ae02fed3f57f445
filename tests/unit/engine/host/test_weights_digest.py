"""Digests of weights: equal for bit-equal ones; what never changes is hashed once."""

import asyncio
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch

from tests.support.models.trainable_nets import SHAPE, TinyNet
from tests.support.servers.serving import rebuilt
from tests.unit.engine.deployments import deployment, hosted
from trocar_server.engine.host import weights_digest as digests
from trocar_server.engine.host.deployment import make_deployment
from trocar_server.engine.host.weights_digest import weights_digest
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.models import make_training_copy
from trocar_server.storage.fingerprint import fingerprint

ALL = set(rebuilt(TinyNet).state_dict())
BUFFERS = {name for name, _ in rebuilt(TinyNet).named_buffers()}


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that were hashed."""
    names: list[str] = []

    def noted(state: dict[str, torch.Tensor]) -> str:
        names.extend(state)
        return fingerprint(state)

    monkeypatch.setattr(digests, "fingerprint", noted)
    return names


async def test_equal_weights_have_one_digest_and_others_another(owner: DeviceThread) -> None:
    first, second = deployment(TinyNet, SHAPE), deployment(TinyNet, SHAPE)
    found = [await weights_digest(each, [first, second], owner) for each in (first, second)]
    assert found[0] == found[1]
    for name in ALL:
        other = hosted(TinyNet, SHAPE)
        with torch.no_grad():
            other.module.state_dict()[name].add_(1)
        assert await weights_digest(make_deployment(other, 1, 4), [], owner) != found[0]


async def test_weights_that_never_change_are_hashed_once(owner: DeviceThread, hashed: list[str]) -> None:
    model = deployment(TinyNet, SHAPE)
    before = await weights_digest(model, [model], owner)
    assert set(hashed) == ALL
    hashed.clear()
    assert await weights_digest(model, [model], owner) == before
    assert not hashed


async def test_of_a_trainer_only_what_it_trains_is_hashed_again(
    owner: DeviceThread, hashed: list[str]
) -> None:
    base = deployment(TinyNet, SHAPE)
    module: Any = make_training_copy(base.hosted.module, [base.hosted.module.get_parameter("fc.weight")])
    trainer = make_deployment(replace(base.hosted, module=module.eval()), 1, 4, is_live=True)
    before = await weights_digest(trainer, [base, trainer], owner)
    assert before == await weights_digest(base, [base, trainer], owner)
    hashed.clear()
    with torch.no_grad():
        module.fc.weight += 1
    assert await weights_digest(trainer, [trainer], owner) != before
    assert set(hashed) == {"fc.weight", *BUFFERS}
    with torch.no_grad():
        module.fc.weight.copy_(base.hosted.module.get_parameter("fc.weight"))
    assert await weights_digest(trainer, [trainer], owner) == before


async def test_weights_without_a_digest_are_those_of_one_load(owner: DeviceThread) -> None:
    class Sparse(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sparse", torch.eye(3).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    model = deployment(TinyNet, SHAPE)
    odd = replace(model, hosted=replace(model.hosted, module=Sparse()))
    assert await weights_digest(odd, [odd], owner) == odd.version


async def test_calls_that_ask_at_once_hash_once(owner: DeviceThread, hashed: list[str]) -> None:
    model = deployment(TinyNet, SHAPE)
    found = await asyncio.gather(*(weights_digest(model, [model], owner) for _ in range(3)))
    assert len(set(found)) == 1
    assert sorted(hashed) == sorted(ALL)


async def test_what_a_cancelled_call_has_hashed_is_kept(owner: DeviceThread, hashed: list[str]) -> None:
    model, may_go_on = deployment(TinyNet, SHAPE), Event()
    blocked = owner.submit(may_go_on.wait)
    call = asyncio.create_task(weights_digest(model, [model], owner))
    await asyncio.sleep(0)  # it waits for the owner
    call.cancel()
    may_go_on.set()
    await blocked
    with pytest.raises(asyncio.CancelledError):
        await call
    assert set(hashed) == ALL
    hashed.clear()
    await weights_digest(model, [model], owner)
    assert not hashed


async def test_the_digest_does_not_depend_on_the_groups(
    owner: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = deployment(TinyNet, SHAPE), deployment(TinyNet, SHAPE)
    found = await weights_digest(first, [first], owner)
    monkeypatch.setattr(digests, "_GROUP_BYTES", 1)
    assert await weights_digest(second, [second], owner) == found
