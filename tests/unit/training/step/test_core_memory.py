"""What lies where during a step changes no number: checkpointing, spool, host memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.unit.training.trainers import TinyNet, assert_same, batches, by_name, core_of, run, tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "checkpointed": {"activation_checkpointing": ["stem", "block"]},
    "checkpointed_in_one_another": {"activation_checkpointing": ["block", "block.*", "fc"]},
    "host": {"saved_tensors": {"store": "host"}},
    "host_of_a_module": {"saved_tensors": {"store": "host", "modules": ["block"]}},
    "spool": {"saved_tensors": {"store": "spool", "budget_bytes": 0, "min_bytes": 0}},
    "spool_with_a_budget": {"saved_tensors": {"store": "spool", "budget_bytes": 4096, "min_bytes": 64}},
    "spool_of_a_module": {
        "saved_tensors": {"store": "spool", "budget_bytes": 0, "min_bytes": 0, "modules": ["block"]}
    },
    "spool_and_checkpointed": {
        "saved_tensors": {"store": "spool", "budget_bytes": 0, "min_bytes": 0},
        "activation_checkpointing": ["block"],
    },
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_weights_are_those_without_it(name: str, precision: str, tmp_path: Path) -> None:
    base, data = tiny(), batches(6)
    ordinary = core_of(base, precision=precision)
    core = core_of(base, tmp_path, precision=precision, **VARIANTS[name])
    expected, results = run(ordinary, data), run(core, data)
    assert_same(core.module, ordinary.module)
    assert [result.loss for result in results] == [result.loss for result in expected]
    core.close()
    assert not list(tmp_path.rglob("*.spool"))


def test_bytes_of_the_spool_are_those_of_the_step(tmp_path: Path) -> None:
    spec = {"store": "spool", "budget_bytes": 0, "min_bytes": 0}
    core = core_of(tiny(), tmp_path, saved_tensors=spec)
    first, second = run(core, batches(2))
    assert first.saved_bytes == second.saved_bytes > 0
    assert first.written_bytes > 0
    core.close()


def test_resnet18_with_checkpointed_layers_and_a_spool(tmp_path: Path) -> None:
    base, data = by_name("resnet18"), batches(2, 1000, shape=(3, 64, 64))
    ordinary = core_of(base)
    core = core_of(
        base,
        tmp_path,
        activation_checkpointing=["layer*"],
        saved_tensors={"store": "spool", "budget_bytes": 1 << 20},
    )
    run(ordinary, data)
    run(core, data)
    assert_same(core.module, ordinary.module)
    core.close()


class Iterated(nn.Module):
    """A spectral norm, whose buffers decide on its weight and move with every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.normed = nn.Sequential(spectral_norm(nn.Linear(6, 6)), nn.Tanh())
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.normed(self.first(x)))


def test_buffers_that_decide_on_values_are_those_of_the_first_forward() -> None:
    base, data = tiny(Iterated, (4,)), batches(4, shape=(4,))
    ordinary = core_of(base)
    core = core_of(base, activation_checkpointing=["normed"])
    run(ordinary, data)
    run(core, data)
    assert_same(core.module, ordinary.module)


def test_nothing_is_left_on_the_tree(tmp_path: Path) -> None:
    core = core_of(
        tiny(),
        tmp_path,
        activation_checkpointing=["block"],
        saved_tensors={"store": "spool", "budget_bytes": 0, "min_bytes": 0, "modules": ["stem"]},
        gradient_edits=[{"selector": "block/grad_out", "name": "scale", "options": {"factor": 0.5}}],
        losses=[{"name": "cross_entropy"}, {"name": "l2_norm", "selector": "stem"}],
    )
    before = torch.get_rng_state()
    run(core, batches(2))
    for module in core.module.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
        assert "forward" not in vars(module)
    assert all(not parameter._backward_hooks for parameter in core.module.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    core.close()
    assert isinstance(core.module, TinyNet)
