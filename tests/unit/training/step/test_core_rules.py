"""Gradient edits inside a trainer, against hooks in plain torch, and against the notebook's numbers."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models.notebook_nets import TwoLayers, two_layers
from tests.support.oracles.plain_training import PlainTraining, freeze_all_but
from tests.unit.training.trainers import assert_same, batch_of, batches, by_name, core_of, net, run, tiny
from trocar_server.surgery import PassGuard
from trocar_server.training.losses.batch import Batch

ALL = ["stem", "block", "fc"]

RULES: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "clamp": (
        [{"selector": "**", "name": "clamp", "options": {"low": -0.01, "high": 0.01}}],
        lambda name, gradient: gradient.clamp(-0.01, 0.01),
    ),
    "scale": (
        [{"selector": "fc.*", "name": "scale", "options": {"factor": 0.1}}],
        lambda name, gradient: gradient * 0.1 if name.startswith("fc.") else gradient,
    ),
    "zero": (
        [{"selector": "stem", "name": "zero"}],
        lambda name, gradient: torch.zeros_like(gradient) if name.startswith("stem.") else gradient,
    ),
    "two": (
        [
            {"selector": "fc.bias", "name": "scale", "options": {"factor": 3.0}},
            {"selector": "fc", "name": "clamp", "options": {"low": -0.05, "high": 0.05}},
        ],
        lambda name, gradient: (
            (gradient * 3.0 if name == "fc.bias" else gradient).clamp(-0.05, 0.05)
            if name.startswith("fc.")
            else gradient
        ),
    ),
}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", RULES)
def test_rules_on_parameters(name: str, accumulation: int) -> None:
    base, data = tiny(), batches(6)
    specs, change = RULES[name]
    model = copy.deepcopy(net(base))
    freeze_all_but(model, ALL)
    for path, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, path=path: change(path, gradient))
    core = core_of(base, gradient_edits=specs, accumulation=accumulation)
    results = run(core, data)
    assert_same(core.module, PlainTraining(model, accumulation=accumulation).run(data))
    assert all(result.changed[0] > 0 for result in results)


def test_noise_on_parameters_draws_from_the_steps_random_numbers() -> None:
    base, data = tiny(), batches(6)
    model = copy.deepcopy(net(base))
    freeze_all_but(model, ALL)
    for parameter in model.fc.parameters():
        parameter.register_hook(lambda gradient: gradient + torch.randn_like(gradient) * 0.3)
    rules = [{"selector": "fc", "name": "noise", "options": {"scale": 0.3}}]
    core = core_of(base, gradient_edits=rules)
    run(core, data)
    assert_same(core.module, PlainTraining(model).run(data))


def test_a_rule_at_a_value_of_the_pass() -> None:
    base, data = tiny(), batches(6)
    model = copy.deepcopy(net(base))
    freeze_all_but(model, ALL)

    def clamped(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    model.stem.register_forward_hook(clamped)
    rules = [{"selector": "stem/grad_out", "name": "clamp", "options": {"low": -1e-3, "high": 1e-3}}]
    core = core_of(base, gradient_edits=rules)
    results = run(core, data)
    assert_same(core.module, PlainTraining(model).run(data))
    assert results[0].changed[0] > 0


def test_the_notebooks_clip_grad_on_its_three_layer_net() -> None:
    base = tiny(TwoLayers, (100,))
    _, x = two_layers()
    # The mean of |output + 1e6| over five outputs has the slope of their sum over five; the rule comes first.
    core = core_of(
        base,
        losses=[{"name": "l1", "weight": 5.0}],
        gradient_edits=[{"selector": "**", "name": "clamp", "options": {"low": -1.0, "high": 1.0}}],
    )
    core.forward_backward(Batch((x,), {}, {"": torch.full((1, 5), -1e6)}, 1), PassGuard())
    assert torch.equal(core.gradients()["fc2.bias"], torch.ones(5))
    assert all(gradient.abs().max() <= 1.0 for gradient in core.gradients().values())


def test_a_clamp_cuts_what_is_larger() -> None:
    base = tiny(TwoLayers, (100,))
    _, x = two_layers()
    rules = [{"selector": "**", "name": "clamp", "options": {"low": -1.0, "high": 1.0}}]
    core = core_of(base, losses=[{"name": "l1", "weight": 50.0}], gradient_edits=rules)
    core.forward_backward(Batch((x,), {}, {"": torch.full((1, 5), -1e6)}, 1), PassGuard())
    assert torch.equal(core.gradients()["fc2.bias"], torch.ones(5))


def test_the_notebooks_clip_grad_on_resnet18() -> None:
    base, data = by_name("resnet18", 28), batches(1, 1000, size=10, shape=(3, 28, 28))
    model = copy.deepcopy(base.module).train().requires_grad_(True)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    (nn.functional.cross_entropy(model(data[0][0]), data[0][1]) * 100.0).backward()
    rules = [{"selector": "**", "name": "clamp", "options": {"low": -0.1, "high": 0.1}}]
    core = core_of(base, losses=[{"name": "cross_entropy", "weight": 100.0}], gradient_edits=rules)
    core.forward_backward(batch_of(data[0]), PassGuard())
    found = core.gradients()
    expected: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert max(float(gradient.abs().max()) for gradient in found.values()) == pytest.approx(0.1)


def test_a_hook_that_zeroes_the_bias_of_the_head() -> None:
    base, data = by_name("resnet18"), batches(2, 1000, shape=(3, 64, 64))
    core = core_of(base, trainable=["fc"], gradient_edits=[{"selector": "fc.bias", "name": "zero"}])
    core.forward_backward(batch_of(data[0]), PassGuard())
    assert torch.equal(core.gradients()["fc.bias"], torch.zeros(1000))
    core.optimizer_step()
    assert torch.equal(net(core).fc.bias, net(base).fc.bias)
    assert not torch.equal(net(core).fc.weight, net(base).fc.weight)
