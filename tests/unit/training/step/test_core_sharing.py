"""What a trainer shares with its base model, and what others see of it."""

import copy
import gc
import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.servers.footprint import tensor_count
from tests.unit.training.trainers import (
    TinyNet,
    assert_same,
    batch_of,
    batches,
    by_name,
    core_of,
    net,
    run,
    tiny,
)
from trocar_server.errors import ServiceError
from trocar_server.models import make_replica
from trocar_server.surgery import PassGuard


def fingerprint(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def versions(module: nn.Module) -> list[int]:
    return [tensor._version for tensor in module.state_dict(keep_vars=True).values()]


def test_two_trainers_on_one_base_leave_it_and_each_other_alone() -> None:
    base, data = by_name("resnet18"), batches(2, 1000, shape=(3, 64, 64))
    before, counted = fingerprint(base.module), versions(base.module)
    alone = core_of(base, trainable=["layer4", "fc"])
    run(alone, data)
    one = core_of(base, trainable=["layer4", "fc"])
    other = core_of(base, optimizer={"name": "adam", "options": {"lr": 0.1}}, ema_decay=0.9)
    for pair in data:
        run(one, [pair])
        run(other, [pair])
    assert_same(one.module, alone.module)
    assert fingerprint(base.module) == before
    assert versions(base.module) == counted
    assert not any(parameter.requires_grad for parameter in base.module.parameters())
    assert not any(module.training for module in base.module.modules())


def test_frozen_weights_are_the_bases_memory_and_nothing_else_is() -> None:
    base = by_name("resnet18")
    core = core_of(base, trainable=["layer4"], ema_decay=0.9)
    theirs = dict(base.module.named_parameters())
    for view in (core.module, core.hosted.module, make_replica(core.hosted.module)):
        for name, parameter in view.named_parameters():
            is_shared = parameter.data_ptr() == theirs[name].data_ptr()
            assert is_shared == (name not in core.trainable), name
        for mine, other in zip(view.buffers(), base.module.buffers(), strict=True):
            assert mine.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("ema_decay", [None, 0.5])
def test_the_hosted_model_follows_the_steps(ema_decay: float | None) -> None:
    base, data = tiny(), batches(3)
    core = core_of(base, head={"classes": 3}, ema_decay=ema_decay, losses=[{"name": "cross_entropy"}])
    replica = make_replica(core.hosted.module)
    shown = copy.deepcopy(core.module).eval()
    average = {name: p.detach().clone() for name, p in core.module.named_parameters()}
    for x, y in data:
        run(core, [(x, y % 3)])
        for name, parameter in core.module.named_parameters():
            average[name].mul_(0.5).add_(parameter.detach(), alpha=0.5)
        shown.load_state_dict({**core.module.state_dict(), **(average if ema_decay else {})})
        with torch.no_grad():
            assert torch.equal(replica(x), shown(x))
            assert torch.equal(core.hosted.module(x), shown(x))
        found = core.evaluate(batch_of((x, y % 3)), PassGuard())
        with torch.no_grad():
            assert found.output is not None
            assert torch.equal(found.output, shown(x))
            assert found.loss == nn.functional.cross_entropy(shown(x), y % 3).item()
    assert core.hosted.categories == ("class 0", "class 1", "class 2")
    assert core.hosted.input_shape == base.input_shape
    assert not any(p.requires_grad for p in core.hosted.module.parameters())
    assert not any(module.training for module in core.hosted.module.modules())


def test_evaluation_moves_nothing() -> None:
    base, data = tiny(), batches(4)
    unbroken, core = core_of(base), core_of(base)
    run(unbroken, data)
    for pair in data:
        core.evaluate(batch_of(data[0]), PassGuard())
        run(core, [pair])
    assert_same(core.module, unbroken.module)


def test_others_draw_the_same_random_numbers_as_without_a_trainer() -> None:
    base, data = tiny(), batches(2)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    core = core_of(base, head={"classes": 5})
    run(core, data)
    core.evaluate(batch_of(data[0]), PassGuard())
    assert torch.equal(torch.rand(4), expected)


def test_a_trainer_counts_what_it_owns() -> None:
    core = core_of(
        tiny(), trainable=["fc"], ema_decay=0.9, optimizer={"name": "adam", "options": {"lr": 0.1}}
    )
    fresh = core.describe()
    assert fresh.trainable == ("fc.weight", "fc.bias")
    assert fresh.trainable_count == 45
    assert fresh.frozen_count == sum(p.numel() for p in core.module.parameters()) - 45
    assert fresh.trained_bytes == fresh.average_bytes == 45 * 4
    assert fresh.buffer_bytes == 2 * (8 + 8) * 4 + 2 * 8
    assert fresh.optimizer_bytes == 0
    assert fresh.train_mode == ("", "pool", "drop", "fc")
    run(core, batches(1))
    assert core.describe().optimizer_bytes == 2 * 45 * 4 + 2 * 4
    assert core.describe().owned_bytes == 4 * 45 * 4 + 2 * 4 + fresh.buffer_bytes


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.second(torch.relu(self.first(x))))


@pytest.mark.parametrize("in_backward", [False, True])
def test_tied_weights_stay_tied(in_backward: bool) -> None:
    base, data = tiny(Tied, (4,)), batches(4, shape=(4,))
    plain = copy.deepcopy(base.module).train().requires_grad_(True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    spec = {"name": "sgd", "options": {"lr": 0.1}, "in_backward": in_backward}
    core = core_of(base, optimizer=spec, ema_decay=0.5)
    run(core, data)
    assert_same(core.module, plain)
    assert net(core).first.weight is net(core).second.weight
    shown = net(core.hosted)
    assert shown.first.weight is shown.second.weight
    assert not torch.equal(shown.first.weight, net(core).first.weight)


class Recurrent(nn.Module):
    """An LSTM, which keeps its weights in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.lstm(x)[0][:, -1])


def test_a_recurrent_layer_is_trained() -> None:
    base, data = tiny(Recurrent, (3, 4)), batches(3, shape=(3, 4))
    plain = copy.deepcopy(base.module).train().requires_grad_(True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    core = core_of(base, optimizer={"name": "sgd", "options": {"lr": 0.1}})
    run(core, data)
    assert_same(core.module, plain)
    assert torch.equal(core.hosted.module(data[0][0]), plain.eval()(data[0][0]))


def test_a_closed_trainer_takes_no_steps() -> None:
    core = core_of(tiny())
    core.close()
    with pytest.raises(ServiceError, match="closed"):
        run(core, batches(1))
    assert isinstance(core.module, TinyNet)


class Watching(nn.Module):
    """Notes whether algorithms are deterministic while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 5)
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Any:
        self.seen.append(torch.are_deterministic_algorithms_enabled())
        return self.fc(x)


def test_deterministic_mode_holds_in_steps_only() -> None:
    data = batches(1, shape=(4,))
    core = core_of(tiny(Watching, (4,)), deterministic=True)
    net(core).seen.clear()
    run(core, data)
    assert net(core).seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ServiceError):
        run(core, batches(1, shape=(5,)))
    assert not torch.are_deterministic_algorithms_enabled()


def test_steps_leave_no_tensors_behind() -> None:
    core, data = core_of(tiny(), activation_checkpointing=["block"], ema_decay=0.9), batches(1)
    run(core, data * 3)
    gc.collect()
    before = tensor_count()
    gc.disable()
    try:
        run(core, data * 10)
        assert tensor_count() <= before
    finally:
        gc.enable()
