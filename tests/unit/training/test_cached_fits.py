"""Whatever a trainer does in its steps, a fit on kept features ends with the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.training.fits import dataset, fit_of, run_fit, shown_core
from tests.unit.training.trainers import TinyNet, assert_same, by_name, tiny, value_edit
from trocar_server.training.spec.trainer_spec import TrainerSpec
from trocar_server.training.step.core import TrainerCore

LAST = ["block", "fc"]
SGD = {"name": "sgd", "options": {"lr": 0.05, "momentum": 0.9}}

VARIANTS: dict[str, dict[str, Any]] = {
    "rules": {
        "gradient_edits": [
            {"selector": "fc.*", "name": "clamp", "options": {"low": -0.01, "high": 0.01}},
            {"selector": "block/grad_out", "name": "scale", "options": {"factor": 0.5}},
            {"selector": "fc.bias", "name": "noise", "options": {"scale": 0.1}},
        ]
    },
    "frozen tap": {
        "losses": [{"name": "cross_entropy"}, {"name": "l2_norm", "selector": "stem", "weight": 0.1}],
    },
    "trained tap": {
        "losses": [{"name": "cross_entropy"}, {"name": "l2_norm", "selector": "block.0", "weight": 0.1}],
    },
    "input of a tap": {
        "losses": [{"name": "cross_entropy"}, {"name": "l1_norm", "selector": "block/in", "weight": 0.1}],
    },
    "edit in the frozen part": {"edits": [value_edit("stem.1", "steer", range(8), alpha=0.1)]},
    "edit in the trained part": {"edits": [value_edit("block/in", "project_out", [range(8)])]},
    "accumulation": {"accumulation": 3, "clip_norm": 0.1},
    "average": {"ema_decay": 0.8},
    "lbfgs": {"optimizer": {"name": "lbfgs", "options": {"lr": 0.1, "max_iter": 3}}},
    "bf16": {"precision": "bf16"},
    "deterministic": {"deterministic": True},
    "checkpointing": {"activation_checkpointing": ["block"]},
    "spool": {"saved_tensors": {"store": "spool", "budget_bytes": 0, "min_bytes": 0}},
    "in backward": {"optimizer": {**SGD, "in_backward": True}},
    "regularizer": {"regularizers": [{"parameters": ["block"], "norm": "l1", "weight": 0.01}]},
    "head": {"trainable": ["fc"], "head": {"classes": 5, "hidden": [7], "dropout": 0.5}},
    "schedule": {"schedule": {"name": "cosine", "per": "epoch", "warmup": 1}},
    "batch norm": {"trainable": ["fc"], "train_mode": ["block"]},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("count", "shuffle"), [(14, True), (12, False)])
def test_trainers_of_every_kind_end_with_the_same_bits(
    name: str, count: int, shuffle: bool, tmp_path: Path
) -> None:
    base, told = tiny(TinyNet), []
    cores = []
    for mode in ("auto", "off"):
        fields = {"trainable": LAST, "optimizer": SGD, **VARIANTS[name]}
        core = shown_core(base, tmp_path / mode, **fields)
        fit = fit_of(
            core,
            dataset(count),
            dataset(10, seed=2),
            tmp_path,
            epochs=4,
            batch_size=4,
            shuffle=shuffle,
            feature_cache={"mode": mode, "memory_bytes": 1000},
        )
        events = run_fit(fit)
        told.append([(e.kind, e.loss, e.metrics, e.gradient_norm) for e in events if e.kind != "cache"])
        refusals = {} if mode == "auto" and name != "frozen tap" else fit.cache_refusals
        assert fit.cache_refusals == refusals
        cores.append(core)
        core.close()

    assert_same(cores[0].module, cores[1].module)
    assert_same(cores[0].hosted.module, cores[1].hosted.module)
    assert str(told[0]) == str(told[1])


def test_frozen_value_of_a_loss_is_computed_in_every_step() -> None:
    core = shown_core(trainable=["fc"], **VARIANTS["frozen tap"])
    fit = fit_of(core, dataset(12), epochs=2, batch_size=4)
    run_fit(fit)
    assert "no frozen module" in fit.cache_refusals["training"]


def test_teacher_needs_the_inputs() -> None:
    fields = {"trainable": ["fc"], "losses": [{"name": "mse", "teacher": {"model_id": "t"}}]}
    base = tiny(TinyNet)
    core = TrainerCore(
        base, TrainerSpec.model_validate({"model_id": "m", **fields}), {"t": base}, Path("unused")
    )
    fit = fit_of(core, dataset(12), epochs=2, batch_size=4, metrics=[])
    run_fit(fit)
    assert "teacher" in fit.cache_refusals["training"]


@pytest.mark.parametrize("trained", [["fc"], ["layer4", "fc"], ["layer4.1.conv2"]], ids=str)
def test_resnet18_ends_with_the_same_bits(trained: list[str]) -> None:
    base = by_name("resnet18", 32)
    cores = []
    for mode in ("auto", "off"):
        core = shown_core(base, head={"classes": 5}, trainable=trained, optimizer=SGD)
        fit = fit_of(
            core, dataset(22, shape=(3, 32, 32)), epochs=3, batch_size=8, feature_cache={"mode": mode}
        )
        run_fit(fit)
        assert (fit.cache_refusals == {}) is (mode == "auto")
        cores.append(core)
    assert_same(cores[0].module, cores[1].module)


def test_random_numbers_of_others_stay_where_they_are() -> None:
    core = shown_core(trainable=["fc"])
    state = torch.get_rng_state()
    run_fit(fit_of(core, dataset(12), dataset(10, seed=2), epochs=3, batch_size=4))
    assert torch.equal(torch.get_rng_state(), state)
