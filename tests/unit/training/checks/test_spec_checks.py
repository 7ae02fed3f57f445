"""Descriptions of trainers that cannot work: every problem in one error, before anything starts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models.tiny_models import DataDependent, Plain, Structured
from tests.unit.engine.deployments import hosted, hosted_by_name
from trocar_api.reasons import ErrorReason
from trocar_server.engine.host.recordings import record_example
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, stages_for
from trocar_server.surgery import Recording
from trocar_server.training.checks.spec_checks import check_spec, parse_spec
from trocar_server.training.spec.trainer_spec import TrainerSpec


def _recorded(model: HostedModel) -> tuple[HostedModel, Recording]:
    return model, replace(record_example(model)[1], stages=stages_for(model))


@pytest.fixture(scope="module")
def resnet() -> tuple[HostedModel, Recording]:
    return _recorded(hosted_by_name("resnet18"))


@pytest.fixture(scope="module")
def plain() -> tuple[HostedModel, Recording]:
    return _recorded(hosted(Plain, (3, 8, 8)))


def _spec(**fields: Any) -> TrainerSpec:
    return parse_spec({"model_id": "m", **fields})


def _problems(
    model: tuple[HostedModel, Recording], teachers: Mapping[str, HostedModel] | None = None, **fields: Any
) -> str:
    """Return what a description is refused with; empty where it is fine."""
    try:
        check_spec(_spec(**fields), *model, teachers or {})
    except ServiceError as error:
        return error.message if error.reason is ErrorReason.TRAINER_INVALID else repr(error)
    return ""


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"head": {"classes": 10}, "trainable": ["fc"]},
        {"head": {"classes": 10, "hidden": [32], "dropout": 0.1}, "trainable": ["layer4", "fc.1"]},
        {
            "trainable": ["stage4", "head"],
            "train_mode": ["**:BatchNorm2d"],
            "activation_checkpointing": ["layer*"],
        },
        {
            "trainable": ["layer4", "fc"],
            "gradient_edits": [
                {"selector": "fc.*", "name": "clamp", "options": {"low": -0.1, "high": 0.1}},
                {"selector": "layer4.0.relu@1/grad_out", "name": "zero"},
                {"selector": "stage4/grad_in", "name": "scale", "options": {"factor": 2}},
            ],
            "optimizer": {"name": "adamw", "groups": [{"parameters": ["fc"], "options": {"lr": 0.1}}]},
            "schedule": {"name": "one_cycle", "options": {"max_lr": [0.1, 0.01]}},
            "regularizers": [{"parameters": ["**.weight", "stage4"]}],
        },
        {"optimizer": {"groups": [{"parameters": ["stage1"], "options": {"lr": 0.001}}]}},
        {
            "losses": [
                {"name": "cross_entropy", "options": {"label_smoothing": 0.1}},
                {"name": "l2_norm", "selector": "layer4", "weight": 0.1},
                {"name": "mse", "selector": "fc/in", "target": "features"},
            ]
        },
        {"saved_tensors": {"store": "spool", "modules": ["layer1", "layer2"], "store_dtype": "bf16"}},
        {"optimizer": {"name": "lbfgs"}, "ema_decay": 0.9, "clip_norm": 1.0},
        {"optimizer": {"in_backward": True}},
    ],
)
def test_what_works_is_let_through(resnet: tuple[HostedModel, Recording], fields: dict[str, Any]) -> None:
    assert _problems(resnet, **fields) == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head": {}}, "head.classes: give the number of classes"),
        ({"head": {"classes": 3, "path": "fcc"}}, "head.path: no module 'fcc'; nearest: fc"),
        ({"head": {"classes": 3, "path": "layer4"}}, "does not take one vector per sample"),
        (
            {"head": {"classes": 3, "path": "conv1"}},
            "head: with a new layer at 'conv1' the model does not run",
        ),
        (
            {"head": {"classes": 3, "hidden": [4], "init": "zeros"}},
            "head.init: hidden layers of zeros never learn",
        ),
        ({"trainable": ["layer5"]}, r"trainable[0]: 'layer5' matches no parameter; nearest: layer4"),
        ({"trainable": ["relu"]}, "trainable[0]: 'relu' is a module without floating-point parameters"),
        ({"trainable": ["fc", "layer4["]}, "trainable[1]: "),
        ({"train_mode": ["bn9"]}, "train_mode[0]: 'bn9' matches no module; nearest: bn1"),
        ({"activation_checkpointing": ["x"]}, "activation_checkpointing[0]: 'x' matches no module"),
        ({"saved_tensors": {"store": "spool", "modules": ["x"]}}, "saved_tensors.modules[0]: 'x' matches no"),
        (
            {"saved_tensors": {"store": "host", "modules": ["fc"]}},
            "saved_tensors.modules: only a spool has this option",
        ),
        (
            {"saved_tensors": {"store_dtype": "bf16"}},
            "saved_tensors.store_dtype: only a spool has this option",
        ),
        (
            {"saved_tensors": {"store": "host", "device_bytes": 1}},
            "saved_tensors.device_bytes: only a spool has this option",
        ),
        ({"losses": []}, "losses: give at least one"),
        (
            {"losses": [{"name": "mse", "selector": "layer9"}]},
            "losses[0].selector: no module 'layer9'; nearest",
        ),
        ({"losses": [{"name": "mse", "selector": "layer*"}]}, "means 4 values ('layer1', 'layer2'"),
        ({"losses": [{"name": "mse", "selector": "layer1.0.relu"}]}, "is called 2 times in one pass"),
        ({"losses": [{"name": "mse", "selector": "fc/grad_out"}]}, "is not a module's value"),
        ({"losses": [{"name": "mse", "selector": "fc/param(weight)"}]}, "is not a module's value"),
        (
            {"losses": [{"name": "mse", "options": {"redction": "sum"}}]},
            "mse has no such option; nearest: reduction",
        ),
        (
            {"losses": [{"name": "mse", "options": {"reduction": "none"}}]},
            "must be one of mean, sum, not 'none'",
        ),
        (
            {"losses": [{"name": "cross_entropy", "options": {"class_weights": [1.0, 2.0]}}]},
            "losses[0].options.class_weights: must be a list of 1000 numbers, at least 0, one for each class",
        ),
        (
            {"losses": [{"name": "cross_entropy", "options": {"label_smoothing": 1.5}}]},
            "a number from 0 to 1",
        ),
        ({"losses": [{"name": "cross_entropy", "options": {"ignore_index": 0.5}}]}, "must be a whole number"),
        ({"losses": [{"name": "huber", "options": {"delta": 0}}]}, "delta: must be a positive number"),
        (
            {"losses": [{"name": "kl_div", "options": {"temperature": -1.0}}]},
            "temperature: must be a positive",
        ),
        ({"losses": [{"name": "l1_norm", "target": "x"}]}, "losses[0].target: l1_norm uses the value alone"),
        (
            {"losses": [{"name": "mse", "teacher": {"model_id": "resnet"}}]},
            "losses[0].teacher: no loaded model 'resnet'",
        ),
        (
            {"regularizers": [{"parameters": ["x"]}]},
            "regularizers[0].parameters[0]: 'x' matches no parameter",
        ),
        ({"regularizers": [{"parameters": []}]}, "regularizers[0].parameters: select parameters"),
        (
            {"trainable": ["fc"], "regularizers": [{"parameters": ["layer1"]}]},
            "none of these parameters is trained",
        ),
        (
            {"trainable": ["fc"], "gradient_edits": [{"selector": "layer1", "name": "zero"}]},
            "gradient_edits[0].selector: none of the 12 parameters of 'layer1' is trained",
        ),
        (
            {"gradient_edits": [{"selector": "fc", "name": "clamp", "options": {"low": 1, "high": 0}}]},
            "gradient_edits[0]: clamp: low 1.0 is above high 0.0",
        ),
        ({"gradient_edits": [{"selector": "fcc/grad_out", "name": "zero"}]}, "no module 'fcc'; nearest: fc"),
        ({"gradient_edits": [{"selector": "fc/in", "name": "zero"}]}, "'fc/in' selects a value of a pass"),
        (
            {"optimizer": {"options": {"lr": -1}}},
            "optimizer.options: PyTorch rejects them: Invalid learning rate",
        ),
        (
            {"optimizer": {"groups": [{"parameters": ["x"]}]}},
            "optimizer.groups[0].parameters[0]: 'x' matches no",
        ),
        (
            {"optimizer": {"in_backward": True}, "clip_norm": 1.0},
            "optimizer.in_backward: `clip_norm` needs all",
        ),
        ({"optimizer": {"in_backward": True}, "accumulation": 2}, "none can be accumulated"),
        ({"optimizer": {"in_backward": True}, "on_nonfinite": "skip"}, "no step can be skipped"),
        ({"optimizer": {"in_backward": True, "name": "lbfgs"}}, "lbfgs needs all gradients at once"),
        (
            {"optimizer": {"name": "lbfgs"}, "accumulation": 2},
            "accumulation: lbfgs computes its loss several",
        ),
        ({"schedule": {"name": "step"}}, "schedule.options.step_size: step needs it"),
        (
            {"schedule": {"name": "one_cycle", "options": {"max_lr": 0.1}, "warmup": 3}},
            "schedule.warmup: one_cycle has a warm-up of its own",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_field(
    resnet: tuple[HostedModel, Recording], fields: dict[str, Any], message: str
) -> None:
    found = _problems(resnet, **fields)
    assert message in found
    assert "problems: (1)" not in found  # one problem is told as one


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"head": {"classes": 10**6, "hidden": [10**6]}},
            "head: it would have about 1,000,512,000,000 parameters",
        ),
        ({"head": {"classes": 2, "hidden": [1] * 257}}, "head.hidden: has 257 entries; the most is 256"),
        ({"losses": [{"name": "mse"}] * 257}, "losses: has 257 entries; the most is 256"),
        ({"trainable": ["**"] * 5000}, "trainable: has 5000 selectors; the most is 4096, use patterns"),
    ],
)
def test_what_is_too_much_is_refused(
    resnet: tuple[HostedModel, Recording], fields: dict[str, Any], message: str
) -> None:
    assert message in _problems(resnet, **fields)


def test_all_problems_come_in_one_error(resnet: tuple[HostedModel, Recording]) -> None:
    found = _problems(
        resnet,
        head={"classes": 3, "path": "nothing"},
        trainable=["layer7"],
        losses=[{"name": "mse", "selector": "layer8"}, {"name": "huber", "options": {"delta": -1}}],
        optimizer={"name": "sgd", "options": {"momentun": 0.9}, "in_backward": True},
        schedule={"name": "cosine", "options": {"T_max": 0}},
        clip_norm=1.0,
        gradient_edits=[{"selector": "layer9", "name": "scale"}],
    )
    assert "9 problems: (1)" in found
    for part in ("head.path", "trainable[0]", "losses[0].selector", "losses[1].options.delta", "momentun"):
        assert part in found
    for part in (
        "T_max",
        "in_backward",
        "gradient_edits[0]: scale needs",
        "gradient_edits[0].selector: 'layer9'",
    ):
        assert part in found


def test_a_teacher_must_have_a_value_of_the_same_shape(plain: tuple[HostedModel, Recording]) -> None:
    teachers = {"t": hosted(Plain, (3, 8, 8), options={"classes": 7})}
    distilled = {"name": "kl_div", "teacher": {"model_id": "t"}, "options": {"temperature": 2.0}}
    matched = {"name": "mse", "selector": "conv2", "teacher": {"model_id": "t", "selector": "conv2"}}
    assert _problems(plain, teachers, losses=[matched]) == ""
    assert "its value has shape (1, 7) and that of this model (1, 5)" in _problems(
        plain, teachers, losses=[distilled]
    )
    assert _problems(plain, teachers, losses=[distilled], head={"classes": 7}) == ""


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"name": "mse", "teacher": {"model_id": "tt"}}, "no loaded model 'tt'; nearest: t"),
        (
            {"name": "mse", "teacher": {"model_id": "t", "selector": "conv9"}},
            "no module 'conv9'; nearest: conv",
        ),
        (
            {"name": "cross_entropy", "teacher": {"model_id": "t"}},
            "cross_entropy takes no teacher; huber, kl_div",
        ),
        (
            {"name": "mse", "target": "x", "teacher": {"model_id": "t"}},
            "give a target or a teacher, not both",
        ),
        (
            {"name": "kl_div", "teacher": {"model_id": "t"}, "options": {"log_target": True}},
            "value is logits",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(
    plain: tuple[HostedModel, Recording], loss: dict[str, Any], message: str
) -> None:
    assert message in _problems(plain, {"t": hosted(Plain, (3, 8, 8))}, losses=[loss])


def test_a_teacher_that_cannot_take_the_inputs_is_refused(plain: tuple[HostedModel, Recording]) -> None:
    teachers = {"t": hosted(nn.Flatten, (3,)), "u": hosted(DataDependent, (3,))}
    loss = {"name": "mse", "teacher": {"model_id": "u"}}
    assert "'u' cannot take this model's inputs" in _problems(plain, teachers, losses=[loss])


def test_a_model_without_a_main_output_needs_losses_of_values() -> None:
    model = _recorded(hosted(Structured, (3,)))
    found = _problems(model, losses=[{"name": "l1_norm"}])
    assert "the model has no parameters" in found
    assert "losses[0]" not in found  # its output has an `out`
    assert "a list of" not in found


def test_a_loss_that_nothing_trained_influences_is_refused(plain: tuple[HostedModel, Recording]) -> None:
    norm = {"name": "l2_norm", "selector": "conv2"}
    assert "losses: they do not depend on any trained parameter" in _problems(
        plain, losses=[norm], trainable=["fc"]
    )
    assert _problems(plain, losses=[norm], trainable=["conv"]) == ""
    assert _problems(plain, losses=[norm, {"name": "mse"}], trainable=["fc"]) == ""
    penalty = [{"parameters": ["fc"]}]
    assert _problems(plain, losses=[norm], trainable=["fc"], regularizers=penalty) == ""


class Counting(nn.Module):
    """Writes to one of its parameters, which torch refuses where that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.fc = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Any:
        self.count.add_(1)
        return self.fc(x)


def test_a_model_that_does_not_run_with_gradients_is_refused() -> None:
    model = _recorded(hosted(Counting, (3,)))
    assert "trainable: the model does not run with gradients (a leaf Variable" in _problems(model)
    assert _problems(model, trainable=["fc"]) == ""


def test_a_model_that_needs_data_is_checked_on_data() -> None:
    model = _recorded(hosted(DataDependent, (3,)))
    assert not model[1].is_symbolic
    weights = [parameter.clone() for parameter in model[0].module.parameters()]
    assert _problems(model, head={"classes": 4, "path": "first"}) == ""
    assert "no module 'second'" in _problems(model, head={"classes": 4, "path": "second"})
    now = list(model[0].module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, now, strict=True))


def test_the_hosted_model_stays_as_it_was(resnet: tuple[HostedModel, Recording]) -> None:
    module = resnet[0].module
    before = {name: (parameter, parameter._version) for name, parameter in module.named_parameters()}
    _problems(resnet, head={"classes": 3}, trainable=["fc"])
    after = dict(module.named_parameters())
    assert all(
        after[name] is parameter and after[name]._version == v for name, (parameter, v) in before.items()
    )
    assert module.get_submodule("fc").weight.shape == (1000, 512)
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize(
    ("data", "messages"),
    [
        ({}, ["model_id: is required"]),
        (
            {"model_id": "m", "colour": 1, "head": {"classes": 0, "depth": 3}},
            ["colour: unknown field", "head.depth: unknown field", "head.classes: "],
        ),
        (
            {"model_id": "m", "optimizer": {"name": "lion", "options": {"lr": [[1]]}}},
            ["optimizer.name: ", "optimizer.options.lr: must be a number, a string"],
        ),
        (
            {"model_id": "m", "gradient_edits": [{"selector": "x", "name": "zero"}, {"name": "flip"}]},
            ["gradient_edits[1].selector: is required", "gradient_edits[1].name: "],
        ),
        ({"model_id": "m", "ema_decay": float("nan")}, ["ema_decay: "]),
        ({"model_id": "m", "losses": [{"name": "mse", "weight": float("inf")}]}, ["losses[0].weight: "]),
        ({"model_id": "m", "clip_norm": 0, "accumulation": 0}, ["clip_norm: ", "accumulation: "]),
    ],
)
def test_a_description_of_the_wrong_form_is_refused_with_every_field(
    data: dict[str, Any], messages: list[str]
) -> None:
    with pytest.raises(ServiceError) as caught:
        parse_spec(data)
    assert caught.value.reason is ErrorReason.TRAINER_INVALID
    assert len(caught.value.details["problems"].splitlines()) == len(messages)
    for message in messages:
        assert message in caught.value.message
