"""Rules over sets of gradients and on sums, inside a trainer, against torch's own hooks in plain torch."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from tests.support.oracles.plain_training import PlainTraining, freeze_all_but
from tests.unit.training.trainers import assert_same, batch_of, batches, core_of, net, run, tiny
from trocar_api.reasons import ErrorReason
from trocar_server.engine.host.recordings import record_example
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard
from trocar_server.surgery.sessions.gradient_sets import make_set_change
from trocar_server.training.checks.spec_checks import check_spec
from trocar_server.training.spec.trainer_spec import TrainerSpec

ALL = ["stem", "block", "fc"]
Change = Callable[[Sequence[Tensor]], list[Tensor]]


def norm(gradients: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().pow(2).sum()) for gradient in gradients))


def clipped(gradients: Sequence[Tensor]) -> list[Tensor]:
    factor = min(1.0, 0.1 / norm(gradients))
    return [(gradient.double() * factor).to(gradient.dtype) for gradient in gradients]


def zeroed(condition: Callable[[Sequence[Tensor]], bool]) -> Change:
    return lambda gradients: [g * 0 if condition(gradients) else g for g in gradients]


class TorchsHook:
    """`register_multi_grad_hook` tells of all gradients of a backward pass; their sums replace torch's."""

    def __init__(self, model: nn.Module, prefix: str, change: Change) -> None:
        self.parameters = [p for name, p in model.named_parameters() if name.startswith(prefix)]
        self.change = change
        self.sums: dict[Tensor, Tensor] = {}
        register_multi_grad_hook(self.parameters, self.see, mode="all")

    def see(self, gradients: Sequence[Tensor | None]) -> None:
        given = [gradient.clone() for gradient in gradients if gradient is not None]
        assert len(given) == len(self.parameters)
        for parameter, gradient in zip(self.parameters, self.change(given), strict=True):
            self.sums[parameter] = gradient + self.sums[parameter] if parameter in self.sums else gradient

    def put(self, *_: Any) -> None:
        for parameter in self.parameters:
            parameter.grad = self.sums.pop(parameter)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.01)
        made.register_step_pre_hook(self.put)
        return made


SETS: dict[str, tuple[dict[str, Any], str, Change]] = {
    "clip": ({"selector": "**", "name": "clip_norm_of_all", "options": {"max_norm": 0.1}}, "", clipped),
    "clip a part": (
        {
            "selector": "fc.weight",
            "selectors": ["fc.bias"],
            "name": "clip_norm_of_all",
            "options": {"max_norm": 0.1},
        },
        "fc",
        clipped,
    ),
    "zero above": (
        {"selector": "**", "name": "zero_if", "options": {"above": 0.27}},
        "",
        zeroed(lambda gradients: norm(gradients) > 0.27),
    ),
    "zero below": (
        {"selector": "block", "name": "zero_if", "options": {"below": 0.3}},
        "block",
        zeroed(lambda gradients: norm(gradients) < 0.3),
    ),
    "any above": (
        {"selector": "fc", "name": "zero_if", "options": {"above": 0.2, "mode": "any"}},
        "fc",
        zeroed(lambda gradients: any(norm([gradient]) > 0.2 for gradient in gradients)),
    ),
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", SETS)
def test_a_rule_over_a_set_sees_what_torchs_hook_sees(name: str, accumulation: int) -> None:
    base, data = tiny(), batches(6)
    rule, prefix, change = SETS[name]
    model = copy.deepcopy(net(base))
    freeze_all_but(model, ALL)
    hook = TorchsHook(model, prefix, change)
    core = core_of(base, gradient_edits=[rule], accumulation=accumulation)
    results = run(core, data)
    plain = PlainTraining(model, accumulation=accumulation, optimizer=hook.optimizer)
    assert_same(core.module, plain.run(data))
    assert any(result.changed[0] > 0 for result in results)


SUMS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "clamp": (
        {"selector": "**", "name": "clamp", "options": {"low": -0.01, "high": 0.01}},
        lambda gradient: gradient.clamp(-0.01, 0.01),
    ),
    "scale": (
        {"selector": "**", "name": "scale", "options": {"factor": 0.5}},
        lambda gradient: gradient * 0.5,
    ),
}


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("name", SUMS)
def test_a_rule_on_the_sum_acts_as_torchs_post_accumulate_hook(name: str, accumulation: int) -> None:
    base, data = tiny(), batches(6)
    rule, change = SUMS[name]
    model = copy.deepcopy(net(base))
    freeze_all_but(model, ALL)

    def after(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = change(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(after)
    core = core_of(base, gradient_edits=[{**rule, "when": "accumulated"}], accumulation=accumulation)
    results = run(core, data)
    assert_same(core.module, PlainTraining(model, accumulation=accumulation).run(data))
    assert all(result.changed[0] > 0 for result in results)


def test_the_sum_and_each_batch_differ_where_batches_are_accumulated() -> None:
    rule = {"selector": "**", "name": "clamp", "options": {"low": -0.01, "high": 0.01}}
    largest = {}
    for when in ("batch", "accumulated"):
        core = core_of(tiny(), gradient_edits=[{**rule, "when": when}], accumulation=3)
        for pair in batches(3):
            core.forward_backward(batch_of(pair), PassGuard())
        largest[when] = max(float(gradient.abs().max()) for gradient in core.gradients().values())
    assert largest["accumulated"] <= 0.01 < largest["batch"]


def test_a_step_that_fails_leaves_sums_as_they_were() -> None:
    rules = [
        {"selector": "**", "name": "scale", "options": {"factor": 0.5}, "when": "accumulated"},
        {"selector": "**", "name": "clip_norm_of_all", "options": {"max_norm": 0.1}},
    ]
    core = core_of(tiny(), gradient_edits=rules, accumulation=3)
    good, bad = batches(2)
    core.forward_backward(batch_of(good), PassGuard())
    before = {name: gradient.clone() for name, gradient in core.gradients().items()}
    with pytest.raises(ServiceError, match="not finite"):
        core.forward_backward(batch_of((bad[0] * math.inf, bad[1])), PassGuard())
    after = core.gradients()
    assert all(torch.equal(after[name], gradient) for name, gradient in before.items())


def test_lbfgs_sees_the_clipped_set_in_each_of_its_passes() -> None:
    rule = {"selector": "**", "name": "clip_norm_of_all", "options": {"max_norm": 1e-3}}
    core = core_of(tiny(), gradient_edits=[rule], optimizer={"name": "lbfgs"})
    (result,) = run(core, batches(1))
    assert result.gradient_norm <= 1e-3 * 1.001


@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_set_with_something_not_finite_becomes_zeros(mode: str, broken: float) -> None:
    change = make_set_change("zero_if", {"nonfinite": True, "mode": mode})
    whole, torn = torch.ones(3), torch.tensor([1.0, broken])
    assert all(not gradient.any() for gradient in change([whole, torn]))
    assert torch.equal(change([whole, whole])[0], whole)


def test_large_numbers_overflow_no_norm() -> None:
    (found,) = make_set_change("clip_norm_of_all", {"max_norm": 1.0})([torch.full((4,), 1e30)])
    assert torch.allclose(found, torch.full((4,), 0.5))


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"name": "clip_norm_of_all"}, "max_norm"),
        ({"name": "clip_norm_of_all", "options": {"max_norm": -1.0}}, "at least 0"),
        ({"name": "zero_if"}, "needs a condition"),
        ({"name": "zero_if", "options": {"mode": "some", "above": 1.0}}, "'all' or 'any'"),
        ({"name": "zero_if", "options": {"abov": 1.0}}, "nearest: above"),
        ({"name": "clip_norm_of_all", "options": {"max_norm": 1.0}, "selector": "fc/grad_out"}, "parameters"),
        ({"name": "zero", "when": "accumulated", "selector": "fc/grad_out"}, "parameters"),
        ({"name": "zero", "selectors": ["nothing"]}, "nothing"),
    ],
)
def test_a_set_rule_that_cannot_be_is_refused_when_the_trainer_is_made(
    rule: dict[str, Any], words: str
) -> None:
    with pytest.raises(ServiceError, match=words) as caught:
        core_of(tiny(), gradient_edits=[{"selector": "**", **rule}])
    assert caught.value.reason is ErrorReason.TRAINER_INVALID


class HasUnused(nn.Module):
    """A layer that no pass reads, and one that only training does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.unused, self.extra = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x) + self.extra(x) if self.training else self.fc(x)


@pytest.mark.parametrize(("selector", "is_refused"), [("unused", True), ("extra", False), ("fc", False)])
def test_a_rule_on_what_no_pass_reads_is_refused(selector: str, is_refused: bool) -> None:
    base = tiny(HasUnused, (3,))
    rule = {"selector": selector, "name": "zero"}
    spec = TrainerSpec.model_validate({"model_id": "m", "gradient_edits": [rule], "train_mode": ["**"]})
    recording = record_example(base)[1]
    if not is_refused:
        check_spec(spec, base, recording, {})
        return
    with pytest.raises(ServiceError, match=r"'unused\.weight' is not used by the forward pass"):
        check_spec(spec, base, recording, {})


@pytest.mark.parametrize("bound", ["above", "below"])
def test_a_norm_that_is_the_bound_holds_neither_above_nor_below(bound: str) -> None:
    gradients = [torch.tensor([3.0]), torch.tensor([4.0])]
    found = make_set_change("zero_if", {bound: 5.0})(gradients)
    assert [float(each) for each in found] == [3.0, 4.0]
