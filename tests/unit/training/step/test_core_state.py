"""A trainer goes on from its state as if nothing had been between, bit by bit."""

import json
from typing import Any

import pytest
import torch

from tests.unit.training.trainers import assert_same, batch_of, batches, core_of, run, tiny
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard
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
    "noise": {"gradient_rules": [{"selector": "fc", "name": "noise", "options": {"std": 0.1}}]},
}


def again(core: TrainerCore) -> TrainerState:
    """Return a trainer's state as a file would give it back."""
    state = core.state()
    facts = json.loads(json.dumps(state.facts, allow_nan=False))
    return TrainerState({name: tensor.clone() for name, tensor in state.tensors.items()}, facts)


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
