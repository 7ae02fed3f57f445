"""A trainer goes on from its state as if nothing had been between, bit by bit."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.unit.training.trainers import assert_same, batch_of, batches, core_of, net, run, tiny
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard
from trocar_server.training.files.snapshots import same_memory, snapshot
from trocar_server.training.step.core import TrainerCore
from trocar_server.training.step.trainer_state import TrainerState

SPECS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd", "options": {"lr": 0.1, "momentum": 0.9}}},
    "adam": {"optimizer": {"name": "adam", "options": {"lr": 0.01, "betas": [0.8, 0.9], "amsgrad": True}}},
    "adamw_in_backward": {"optimizer": {"name": "adamw", "options": {"lr": 0.01}, "in_backward": True}},
    "rmsprop": {"optimizer": {"name": "rmsprop", "options": {"lr": 0.01, "centered": True}}},
    "adagrad": {"optimizer": {"name": "adagrad", "options": {"lr": 0.01}}},
    "lbfgs": {"optimizer": {"name": "lbfgs", "options": {"lr": 0.5, "max_iter": 4}}},
    "lbfgs_with_a_search": {
        "optimizer": {"name": "lbfgs", "options": {"max_iter": 4, "line_search_fn": "strong_wolfe"}}
    },
    "accumulating": {"accumulation": 4, "ema_decay": 0.9, "clip_norm": 0.1},
    "one_cycle": {
        "optimizer": {"name": "sgd", "options": {"lr": 0.1, "momentum": 0.9}},
        "schedule": {"name": "one_cycle", "options": {"max_lr": 0.5, "total_steps": 30}},
    },
    "warm_up": {"schedule": {"name": "cosine", "options": {"T_max": 10}, "warmup": 7}},
    "adam_one_cycle": {
        "optimizer": {"name": "adam", "options": {"lr": 0.1}},
        "schedule": {"name": "one_cycle", "options": {"max_lr": 0.5, "total_steps": 30}},
    },
    "noise": {"gradient_edits": [{"selector": "fc", "name": "noise", "options": {"scale": 0.1}}]},
}


def again(core: TrainerCore) -> TrainerState:
    """Return a trainer's state as a file would give it back."""
    state = core.state()
    facts = json.loads(json.dumps(state.facts, allow_nan=False))
    return TrainerState({name: tensor.clone() for name, tensor in state.tensors.items()}, facts)


class HalfNet(nn.Module):
    """A linear layer with weights in 16 bits."""

    dtype = torch.bfloat16

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 5).to(self.dtype)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x.to(self.dtype)).float()


class Float16Net(HalfNet):
    """The same in IEEE's format."""

    dtype = torch.float16


class Looking(nn.Module):
    """Looks rows up whose gradients are sparse, unless a trainer wants them dense."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 4, sparse=sparse)
        self.bags = nn.EmbeddingBag(9, 4, sparse=sparse)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Any:
        numbers = (x.abs() * 3).long().clamp(max=8)
        return self.fc(self.rows(numbers).mean(1) + self.bags(numbers))


class LookingDensely(Looking):
    """The same with dense gradients."""

    def __init__(self) -> None:
        super().__init__(sparse=False)


SPARSE: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd", "options": {"lr": 0.1, "momentum": 0.9}}, "accumulation": 2},
    "adam": {"optimizer": {"name": "adam", "options": {"lr": 0.01}}, "clip_norm": 0.1},
    "in_backward": {"optimizer": {"name": "adamw", "options": {"lr": 0.01}, "in_backward": True}},
}


@pytest.mark.parametrize("name", SPARSE)
def test_embeddings_with_sparse_gradients_are_trained_and_saved_as_dense_ones(name: str) -> None:
    base, pairs = tiny(Looking, (4,)), batches(3, shape=(4,))
    core, dense = core_of(base, **SPARSE[name]), core_of(tiny(LookingDensely, (4,)), **SPARSE[name])
    dense.module.load_state_dict(core.module.state_dict())
    for one in (core, dense):
        run(one, pairs)
    assert_same(core.module, dense.module)
    assert net(base).rows.sparse
    assert net(base).bags.sparse
    state = snapshot(core.state())
    assert same_memory(state.tensors) == {}
    core.load_state(state)


HALF: dict[str, Any] = {"optimizer": {"name": "sgd", "options": {"lr": 0.5}}, "ema_decay": 0.999}


@pytest.mark.parametrize("kind", [HalfNet, Float16Net])
def test_averages_follow_weights_of_16_bits_as_in_float64(kind: type[HalfNet]) -> None:
    core, pairs = core_of(tiny(kind, (4,)), **HALF), batches(4, shape=(4,))
    expected = net(core).fc.weight.double().detach().numpy()
    for step in range(200):
        run(core, pairs[step % 4 : step % 4 + 1])
        expected = 0.999 * expected + 0.001 * net(core).fc.weight.double().detach().numpy()
    shown = net(core.hosted).fc.weight
    assert shown.dtype is kind.dtype
    np.testing.assert_allclose(shown.double().detach().numpy(), expected, rtol=2**-8, atol=1e-4)


def test_averages_of_16_bits_go_on_from_their_state() -> None:
    core, other = (core_of(tiny(HalfNet, (4,)), **HALF) for _ in range(2))
    pairs = batches(40, shape=(4,))
    run(core, pairs[:20])
    other.load_state(again(core))
    assert_same(other.hosted.module, core.hosted.module)
    for one in (core, other):
        run(one, pairs[20:])
    assert_same(other.hosted.module, core.hosted.module)
    assert core.describe().average_bytes == 25 * (2 + 4)


def test_a_state_with_averages_in_16_bits_can_be_loaded() -> None:
    """As older versions wrote it."""
    core = core_of(tiny(HalfNet, (4,)), **HALF)
    run(core, batches(3, shape=(4,)))
    state = core.state()
    for name, tensor in state.tensors.items():
        if name.startswith("averages/"):
            state.tensors[name] = tensor.bfloat16()
    other = core_of(tiny(HalfNet, (4,)), **HALF)
    other.load_state(state)
    assert torch.equal(net(other.hosted).fc.weight, state.tensors["averages/fc.weight"])


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("name", SPECS)
def test_it_goes_on_in_another_trainer(name: str, at: int) -> None:
    base, data = tiny(), batches(9)
    unbroken = core_of(base, **SPECS[name])
    expected = run(unbroken, data)
    first = core_of(base, **SPECS[name])
    run(first, data[:at])
    second = core_of(tiny(), **SPECS[name])
    run(second, data[3:6])  # it has a past of its own
    second.load_state(again(first))
    results = run(second, data[at:])
    assert_same(second.module, unbroken.module)
    assert_same(second.hosted.module, unbroken.hosted.module)
    assert [r.loss for r in results] == [r.loss for r in expected[at:]]
    assert [r.learning_rates for r in results] == [r.learning_rates for r in expected[at:]]
    assert second.update_count == unbroken.update_count


def test_it_goes_on_between_the_two_halves_of_a_step() -> None:
    base, data = tiny(), batches(4)
    unbroken = core_of(base, clip_norm=0.05)
    run(unbroken, data)
    first = core_of(base, clip_norm=0.05)
    run(first, data[:2])
    first.forward_backward(batch_of(data[2]), PassGuard())
    second = core_of(base, clip_norm=0.05)
    second.load_state(again(first))
    second.optimizer_step()
    run(second, data[3:])
    assert_same(second.module, unbroken.module)


def test_a_state_is_a_copy() -> None:
    core = core_of(tiny(), optimizer={"name": "adam", "options": {"lr": 0.1}})
    run(core, batches(1))
    state = core.state()
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    run(core, batches(3))
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("damage", ["missing", "shape", "dtype", "extra", "version", "optimizer", "random"])
def test_a_state_that_does_not_fit_changes_nothing(damage: str) -> None:
    spec: dict[str, Any] = {"optimizer": {"name": "adam", "options": {"lr": 0.1}}, "ema_decay": 0.9}
    core, data = core_of(tiny(), **spec), batches(4)
    run(core, data[:2])
    state = again(core)
    tensors, facts = state.tensors, state.facts
    if damage == "missing":
        del tensors["averages/fc.bias"]
    elif damage == "shape":
        tensors["weights/fc.bias"] = torch.zeros(6)
    elif damage == "dtype":
        tensors["buffers/stem.1.running_mean"] = torch.zeros(8, dtype=torch.float64)
    elif damage == "extra":
        tensors["weights/other"] = torch.zeros(1)
    elif damage == "version":
        facts["version"] = 99
    elif damage == "optimizer":
        del tensors["optimizer/fc.bias/exp_avg"]
    else:
        tensors["random/cpu"] = torch.zeros(3, dtype=torch.uint8)
    run(core, data[2:3])
    before = again(core)
    with pytest.raises(ServiceError, match="the checkpoint does not fit"):
        core.load_state(state)
    after = again(core)
    assert after.facts == before.facts
    assert all(torch.equal(after.tensors[name], tensor) for name, tensor in before.tensors.items())
