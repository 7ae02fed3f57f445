"""From declared rules to parameters and values of a trainer's tree."""

from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import Recording, record_calls
from trocar_server.surgery.sessions.gradient_edits import GradientEditSession
from trocar_server.training.spec.trainer_spec import GradientEditSpec
from trocar_server.training.step.gradient_edit_targets import make_rules


@pytest.fixture(scope="module")
def resnet() -> tuple[nn.Module, Recording]:
    with torch.device("meta"):
        model = torchvision.models.resnet18(num_classes=4).eval()
    return model, record_calls(model, (torch.empty((1, 3, 64, 64), device="meta"),))


def _rule(selector: str, **fields: Any) -> GradientEditSpec:
    return GradientEditSpec(**{"selector": selector, "name": "zero", **fields})


def test_rules_mean_trained_parameters_or_values(resnet: tuple[nn.Module, Recording]) -> None:
    trained = ("layer4.1.bn2.weight", "fc.weight", "fc.bias")
    specs = [_rule("**"), _rule("fc.*"), _rule("fc/param_grad(bias)"), _rule("layer4.1.relu@*/grad_out")]
    first, second, third, fourth = make_rules(specs, *resnet, trained)
    assert first.parameters == trained
    assert second.parameters == ("fc.weight", "fc.bias")
    assert third.parameters == ("fc.bias",)
    assert [target.name for target in fourth.targets] == [
        "layer4.1.relu@0/grad_out",
        "layer4.1.relu@1/grad_out",
    ]


def test_resolved_rules_work_in_a_session() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    recording = record_calls(model, (torch.zeros(1, 3),), is_symbolic=False)
    specs = [_rule("2.bias"), _rule("1/grad_out", name="scale", options={"factor": 0.0})]
    trained = [name for name, _ in model.named_parameters()]
    with GradientEditSession(model, make_rules(specs, model, recording, trained)) as session:
        model(torch.rand(5, 3)).sum().backward()
    assert [bool(parameter.grad.any()) for parameter in model.parameters()] == [False, False, True, False]  # type: ignore[union-attr]
    assert session.seen == [2, 20]


def test_every_problem_is_told(resnet: tuple[nn.Module, Recording]) -> None:
    specs = [
        _rule("layer1"),
        _rule("layer9"),
        _rule("fc/grad_out@0"),
        _rule("fc9/grad_out", name="noise"),
        _rule("fx:add/out", name="clamp", options={"low": 0}),
    ]
    with pytest.raises(ServiceError) as caught:
        make_rules(specs, *resnet, ("fc.bias",))
    assert caught.value.reason is ErrorReason.TRAINER_INVALID
    problems = caught.value.details["problems"].splitlines()
    starts = [
        "gradient_edits[0].selector: none of the 12 parameters of 'layer1' is trained",
        "gradient_edits[1].selector: 'layer9' matches no parameter",
        "gradient_edits[2].selector: ",
        "gradient_edits[3]: noise needs the option 'scale'",
        "gradient_edits[3].selector: no module 'fc9'",
        "gradient_edits[4].selector: 'fx:add/out' selects a value of a pass",
    ]
    assert all(line.startswith(start) for line, start in zip(problems, starts, strict=True))
