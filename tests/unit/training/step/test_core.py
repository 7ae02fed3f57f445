"""A trainer does what the same schedule in plain torch does, bit by bit."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models.trainable_nets import TwoVectors
from tests.support.oracles.plain_training import PlainTraining, cross_entropy, freeze_all_but, new_head
from tests.unit.training.trainers import assert_same, batch_of, batches, by_name, core_of, net, run, tiny
from trocar_server.surgery import PassGuard
from trocar_server.training.step.core import StepTotals


def plain_of(module: nn.Module, trained: list[str], head: str = "fc", classes: int = 5) -> Any:
    """Return a copy with a new head, all but some parts frozen."""
    model = copy.deepcopy(module)
    if head:
        new_head(model, head, classes, seed=0)
    freeze_all_but(model, trained)
    return model


PARTS = {
    "head": (["fc"], ["fc"]),
    "block_and_head": (["block", "fc"], ["block", "fc"]),
    "stem_only": (["stem"], ["stem", "fc"]),
    "whole": ([], ["stem", "block", "fc"]),
}


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_a_net_with_dropout_and_batch_norm(part: str) -> None:
    base, data = tiny(), batches(8)
    trainable, trained = PARTS[part]
    plain = PlainTraining(plain_of(base.module, trained))
    core = core_of(base, head={"classes": 5}, trainable=trainable)
    results = run(core, data)
    assert_same(core.module, plain.run(data))
    assert [result.loss for result in results] == plain.losses


@pytest.mark.parametrize(
    ("trainable", "prefixes"),
    [(["fc"], ["fc"]), (["layer4", "fc"], ["layer4", "fc"]), ([], ["conv1", "bn1", "layer", "fc"])],
    ids=["head", "layer4", "whole"],
)
def test_resnet18(trainable: list[str], prefixes: list[str]) -> None:
    base, data = by_name("resnet18"), batches(3, 10, shape=(3, 64, 64))
    prefixes = [*prefixes, *(f"layer{i}" for i in range(1, 5) if "layer" in prefixes)]
    plain = PlainTraining(
        plain_of(base.module, prefixes, classes=10), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)
    )
    core = core_of(
        base,
        head={"classes": 10},
        trainable=trainable,
        optimizer={"name": "sgd", "options": {"lr": 0.05, "momentum": 0.9}},
    )
    run(core, data)
    assert_same(core.module, plain.run(data))


@pytest.mark.parametrize(
    ("architecture", "head", "size"),
    [
        ("mobilenet_v3_small", "classifier.3", 64),
        ("swin_t", "head", 64),
        ("efficientnet_b0", "classifier.1", 64),
    ],
)
def test_other_architectures_as_a_whole(architecture: str, head: str, size: int) -> None:
    base, data = by_name(architecture, size), batches(2, 10, size=2, shape=(3, size, size))
    everything = [name for name, _ in base.module.named_children()]
    plain = PlainTraining(
        plain_of(base.module, everything, head, 10), lambda p: torch.optim.AdamW(p, lr=1e-3)
    )
    core = core_of(base, head={"classes": 10}, optimizer={"name": "adamw", "options": {"lr": 1e-3}})
    run(core, data)
    assert_same(core.module, plain.run(data))


OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ({"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, torch.optim.SGD),
    "adam": ({"lr": 0.01, "betas": [0.8, 0.9], "amsgrad": True}, torch.optim.Adam),
    "adamw": ({"lr": 0.01, "weight_decay": 0.1}, torch.optim.AdamW),
    "rmsprop": ({"lr": 0.01, "momentum": 0.5, "centered": True}, torch.optim.RMSprop),
    "adagrad": ({"lr": 0.05, "lr_decay": 0.01}, torch.optim.Adagrad),
    "lbfgs": ({"lr": 0.5, "max_iter": 5, "line_search_fn": "strong_wolfe"}, torch.optim.LBFGS),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer(name: str) -> None:
    base, data = tiny(), batches(6)
    options, kind = OPTIMIZERS[name]
    plain_options = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    plain = PlainTraining(plain_of(base.module, ["stem", "block", "fc"]), lambda p: kind(p, **plain_options))
    core = core_of(base, head={"classes": 5}, optimizer={"name": name, "options": options})
    results = run(core, data)
    assert_same(core.module, plain.run(data))
    assert [result.loss for result in results] == plain.losses


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop", "adagrad"])
def test_an_optimizer_in_the_backward_pass_gives_the_same_weights(name: str) -> None:
    base, data = tiny(), batches(6)
    options, kind = OPTIMIZERS[name]
    plain_options = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    plain = PlainTraining(
        plain_of(base.module, ["stem", "block", "fc"]),
        lambda p: kind(p, **plain_options),
        ema_decay=0.9,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    )
    core = core_of(
        base,
        head={"classes": 5},
        optimizer={"name": name, "options": options, "in_backward": True},
        schedule={"name": "step", "options": {"step_size": 2, "gamma": 0.5}},
        ema_decay=0.9,
    )
    run(core, data)
    assert_same(core.module, plain.run(data))
    averages = dict(core.hosted.module.named_parameters())
    assert all(torch.equal(averages[name], average) for name, average in plain.average.named_parameters())
    assert core.gradients() == {}


def test_parameter_groups_have_options_of_their_own() -> None:
    base, data = tiny(), batches(5)
    model = plain_of(base.module, ["stem", "block", "fc"])

    def groups(_: Any) -> torch.optim.Optimizer:
        rest = [p for name, p in model.named_parameters() if not name.startswith("fc")]
        return torch.optim.SGD([{"params": model.fc.parameters(), "lr": 0.5}, {"params": rest}], lr=0.01)

    core = core_of(
        base,
        head={"classes": 5},
        optimizer={
            "name": "sgd",
            "options": {"lr": 0.01},
            "groups": [{"parameters": ["fc"], "options": {"lr": 0.5}}],
        },
    )
    results = run(core, data)
    assert_same(core.module, PlainTraining(model, groups).run(data))
    assert results[0].learning_rates == [0.5, 0.01]


SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "step": (
        {"name": "step", "options": {"step_size": 2, "gamma": 0.1}},
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.1),
    ),
    "cosine": (
        {"name": "cosine", "options": {"T_max": 8}},
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
    ),
    "one_cycle": (
        {"name": "one_cycle", "options": {"max_lr": 0.5, "total_steps": 8}},
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, 8),
    ),
    "warm_up": (
        {"name": "cosine", "options": {"T_max": 5}, "warmup": 3, "warmup_start": 0.1},
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
            ],
            [3],
        ),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_schedule(name: str) -> None:
    base, data = tiny(), batches(7)
    spec, make = SCHEDULES[name]
    plain = PlainTraining(
        plain_of(base.module, ["stem", "block", "fc"]),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        scheduler=make,
    )
    core = core_of(
        base,
        head={"classes": 5},
        optimizer={"name": "sgd", "options": {"lr": 0.1, "momentum": 0.9}},
        schedule=spec,
    )
    run(core, data)
    assert_same(core.module, plain.run(data))


def test_accumulation_with_a_clipped_norm_and_a_moving_average() -> None:
    base, data = tiny(), batches(12)
    plain = PlainTraining(
        plain_of(base.module, ["stem", "block", "fc"]), accumulation=3, clip_norm=0.2, ema_decay=0.8
    )
    core = core_of(base, head={"classes": 5}, accumulation=3, clip_norm=0.2, ema_decay=0.8)
    results = run(core, data)
    assert_same(core.module, plain.run(data))
    averages = dict(core.hosted.module.named_parameters())
    assert all(torch.equal(averages[name], average) for name, average in plain.average.named_parameters())
    assert [result.is_update for result in results] == [False, False, True] * 4
    assert core.update_count == 4
    assert core.step_count == 12


def test_bfloat16_autocast() -> None:
    base, data = tiny(), batches(5)
    plain = PlainTraining(plain_of(base.module, ["stem", "block", "fc"]), precision="bf16")
    core = core_of(base, head={"classes": 5}, precision="bf16")
    run(core, data)
    assert_same(core.module, plain.run(data))


def test_batch_norm_in_train_mode_by_name() -> None:
    base, data = tiny(), batches(5)
    model = plain_of(base.module, ["fc"])
    model.block.train()
    core = core_of(base, head={"classes": 5}, trainable=["fc"], train_mode=["block"])
    run(core, data)
    assert_same(core.module, PlainTraining(model).run(data))
    assert not torch.equal(net(core).block[1].running_mean, net(base).block[1].running_mean)


def test_label_smoothing_and_class_weights() -> None:
    base, data = tiny(), batches(4)
    weights = [0.5, 1.0, 2.0, 1.0, 1.5]
    loss = cross_entropy(label_smoothing=0.1, weight=torch.tensor(weights))
    plain = PlainTraining(plain_of(base.module, ["stem", "block", "fc"]), loss=loss)
    term = {"name": "cross_entropy", "options": {"label_smoothing": 0.1, "class_weights": weights}}
    core = core_of(base, head={"classes": 5}, losses=[term])
    run(core, data)
    assert_same(core.module, plain.run(data))


def test_regularizers_are_part_of_the_loss() -> None:
    base, data = tiny(), batches(6)

    def loss(model: Any, x: Any, y: Any) -> Any:
        plain = nn.functional.cross_entropy(model(x), y)
        one = model.fc.weight.square().sum() + model.fc.bias.square().sum()
        return plain + (one * 0.1 + model.stem[0].weight.abs().sum() * 0.01)

    plain = PlainTraining(plain_of(base.module, ["stem", "block", "fc"]), loss=loss, accumulation=2)
    core = core_of(
        base,
        head={"classes": 5},
        accumulation=2,
        regularizers=[
            {"parameters": ["fc"], "norm": "l2", "weight": 0.1},
            {"parameters": ["stem.0.weight"], "norm": "l1", "weight": 0.01},
        ],
    )
    results = run(core, data)
    assert_same(core.module, plain.run(data))
    assert [result.loss for result in results] == plain.losses


def test_terms_on_a_tap_and_against_a_teacher() -> None:
    base, teacher, data = tiny(), tiny(), batches(6)
    with torch.no_grad():
        for parameter in teacher.module.parameters():
            parameter.mul_(1.5)

    def loss(model: Any, x: Any, y: Any) -> Any:
        seen: dict[str, Any] = {}
        handle = model.block.register_forward_hook(lambda _, __, out: seen.update(block=out.clone()))
        output = model(x)
        handle.remove()
        with torch.no_grad():
            taught = net(teacher)(x)
            features = net(teacher).stem(x)
            features = net(teacher).block(features)
        first = nn.functional.cross_entropy(output, y)
        soft = nn.functional.softmax(taught / 2.0, 1)
        second = (
            nn.functional.kl_div(nn.functional.log_softmax(output / 2.0, 1), soft, reduction="batchmean")
            * 4.0
        )
        third = nn.functional.mse_loss(seen["block"], features)
        fourth = seen["block"].abs().mean()
        return first + second * 0.5 + third * 0.25 + fourth * 0.01

    plain = PlainTraining(plain_of(base.module, ["stem", "block", "fc"], head=""), loss=loss)
    core = core_of(
        base,
        teachers={"big": teacher},
        losses=[
            {"name": "cross_entropy"},
            {
                "name": "kl_div",
                "weight": 0.5,
                "teacher": {"model_id": "big"},
                "options": {"temperature": 2.0},
            },
            {
                "name": "mse",
                "weight": 0.25,
                "selector": "block",
                "teacher": {"model_id": "big", "selector": "block"},
            },
            {"name": "l1_norm", "weight": 0.01, "selector": "block"},
        ],
    )
    results = run(core, data)
    assert_same(core.module, plain.run(data))
    assert [result.loss for result in results] == plain.losses
    assert len(results[0].terms) == 4


def test_an_evaluation_needs_no_main_output_where_every_loss_has_a_selector() -> None:
    core = core_of(tiny(TwoVectors, (3,)), losses=[{"name": "cross_entropy", "selector": "fc"}])
    pair = batches(1, 4, shape=(3,))[0]
    expected = nn.functional.cross_entropy(net(core).fc(pair[0]), pair[1]).item()
    result = core.evaluate(batch_of(pair), PassGuard())
    assert (result.loss, result.output) == (expected, None)
    assert run(core, [pair])[0].loss == expected


def test_steps_add_up() -> None:
    totals = StepTotals()
    totals.add(4, 0.5)
    totals.add(2, 0.25)
    assert (totals.step_count, totals.row_count, totals.compute_s) == (2, 6, 0.75)


_GROUP = {"parameters": ["PLACE"], "options": {"lr": 0.01}}
_TEACHER = {"model_id": "m2", "selector": "PLACE"}


@pytest.mark.parametrize(
    "fields",
    [
        {"trainable": ["PLACE"]},
        {"optimizer": {"name": "sgd", "options": {"lr": 0.1}, "groups": [_GROUP]}},
        {"regularizers": [{"parameters": ["PLACE"], "weight": 0.1}]},
        {"losses": [{"name": "mse", "selector": "PLACE", "teacher": _TEACHER}]},
    ],
    ids=["trainable", "group", "regularizer", "teacher"],
)
def test_a_stage_means_its_module_in_every_field(fields: Any) -> None:
    base, other, data = by_name("resnet18", 32), by_name("resnet18", 32), batches(1, 5, shape=(3, 32, 32))
    means = [json.loads(json.dumps(fields).replace("PLACE", name)) for name in ("stage4", "layer4")]
    cores = [core_of(base, teachers={"m2": other}, head={"classes": 5}, **fields) for fields in means]
    assert len({run(core, data)[0].loss for core in cores}) == 1
    assert_same(cores[0].module, cores[1].module)
