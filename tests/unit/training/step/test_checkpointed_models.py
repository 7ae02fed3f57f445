"""Models that checkpoint parts of themselves in trainers, against the same models without."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models.checkpointed_nets import KINDS, NETS, Layers, Repeated
from tests.support.oracles.plain_training import PlainTraining, freeze_all_but
from tests.unit.training.trainers import Pair, assert_same, batches, core_of, net, run, tiny
from trocar_server.models import HostedModel
from trocar_server.training.step.step_result import StepResult

pytestmark = pytest.mark.filterwarnings(  # of reentrant ones, in passes without gradients
    "ignore:None of the inputs have requires_grad:UserWarning"
)

ALL = ["stem", "block", "fc"]
RULES = {
    "clamp": {"low": -1e-3, "high": 1e-3},
    "scale": {"factor": 0.5},
    "zero": {},
    "noise": {"scale": 0.1},
    "normalise": {"max_norm": 1e-3},
}
TRAINERS: dict[str, dict[str, Any]] = {
    "no rule": {},
    **{
        f"{name} at {selector}": {
            "gradient_edits": [{"selector": selector, "name": name, "options": options}]
        }
        for name, options in RULES.items()
        for selector in ("block.0/grad_out", "block.1/grad_in")
    },
    "in place": {"gradient_edits": [{"selector": "block.2/grad_in", "name": "zero"}]},
    "of all parameters": {"gradient_edits": [{"selector": "**", "name": "clamp", "options": {"high": 1e-3}}]},
    "loss inside": {"losses": [{"name": "l2_norm", "selector": "block.1"}]},
    "loss at an input inside": {
        "losses": [{"name": "cross_entropy"}, {"name": "l2_norm", "selector": "block.4/in", "weight": 0.1}]
    },
    "micro-batches": {
        "accumulation": 3,
        "gradient_edits": [
            {"selector": "block.0/grad_out", "name": "scale", "options": {"factor": 0.5}},
            {"selector": "block", "name": "clamp", "options": {"high": 1e-3}, "when": "accumulated"},
        ],
    },
    "frozen stem": {"trainable": ["block", "fc"]},
    "frozen but the first layer": {
        "trainable": ["stem"],
        "gradient_edits": [{"selector": "block.4/grad_in", "name": "scale", "options": {"factor": 2.0}}],
    },
    "updates in the backward pass": {
        "optimizer": {"name": "sgd", "options": {"lr": 0.1}, "in_backward": True}
    },
    "bf16": {
        "precision": "bf16",
        "gradient_edits": [{"selector": "block.1/grad_in", "name": "scale", "options": {"factor": 0.5}}],
    },
    "checkpointed once more": {
        "activation_checkpointing": ["block"],
        "gradient_edits": [{"selector": "block.1/grad_in", "name": "scale", "options": {"factor": 0.5}}],
    },
    "spooled": {
        "saved_tensors": {"store": "spool", "min_bytes": 0},
        "gradient_edits": [{"selector": "block.1/grad_in", "name": "scale", "options": {"factor": 0.5}}],
    },
    "spooled inside": {
        "saved_tensors": {"store": "spool", "min_bytes": 0, "modules": ["block.0", "block.4", "fc"]},
        "gradient_edits": [{"selector": "block.1/grad_in", "name": "scale", "options": {"factor": 0.5}}],
    },
}


def trained(
    name: str, use_reentrant: bool | None, fields: dict[str, Any], scratch: Path
) -> tuple[nn.Module, list[StepResult]]:
    base = checkpointed(NETS[name], use_reentrant)
    if name == "Repeated":  # of its calls, the second
        fields = _of_second_call(fields)
    core = core_of(base, scratch, **{"trainable": ALL, "seed": 3, **fields})
    with torch.random.fork_rng():
        return core.module, run(core, data(6))


def checkpointed(kind: type[Layers], use_reentrant: bool | None) -> HostedModel:
    base = tiny(kind, (6,))
    net(base).use_reentrant = use_reentrant
    return base


def data(count: int) -> list[Pair]:
    return batches(count, shape=(6,), size=7)


def _of_second_call(fields: dict[str, Any]) -> dict[str, Any]:
    copied = copy.deepcopy(fields)
    for entry in (*copied.get("gradient_edits", ()), *copied.get("losses", ())):
        selector = entry.get("selector", "")
        if "block." in selector:
            path, slash, port = selector.partition("/")
            entry["selector"] = f"{path}@1{slash}{port}"
    return copied


@pytest.mark.parametrize("use_reentrant", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_checkpointed_part_is_trained_as_without(
    trainer: str, name: str, use_reentrant: bool, tmp_path: Path
) -> None:
    expected, results = trained(name, None, TRAINERS[trainer], tmp_path)
    module, mine = trained(name, use_reentrant, TRAINERS[trainer], tmp_path)
    assert_same(module, expected)
    assert [(each.loss, each.terms, each.changed) for each in mine] == [
        (each.loss, each.terms, each.changed) for each in results
    ]
    assert not TRAINERS[trainer].get("gradient_edits") or any(mine[-1].changed.values())


@pytest.mark.parametrize("use_reentrant", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("kind", [Layers, Repeated])
def test_a_rule_inside_is_a_hook_of_plain_torch(kind: type[Layers], use_reentrant: bool) -> None:
    base, model = checkpointed(kind, use_reentrant), copy.deepcopy(net(checkpointed(kind, None)))
    freeze_all_but(model, ALL)
    count = 0

    def clamped(_: nn.Module, __: Any, output: Tensor) -> None:
        nonlocal count
        if count % (3 if kind is Repeated else 1) == 0:
            output.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        count += 1

    model.block[0].register_forward_hook(clamped)
    selector = "block.0@0/grad_out" if kind is Repeated else "block.0/grad_out"
    rule = {"selector": selector, "name": "clamp", "options": {"low": -1e-3, "high": 1e-3}}
    core = core_of(base, gradient_edits=[rule])
    results = run(core, data(6))
    assert_same(core.module, PlainTraining(model).run(data(6)))
    assert all(result.changed[0] > 0 for result in results)


@pytest.mark.parametrize("use_reentrant", KINDS.values(), ids=KINDS)
def test_a_part_with_a_rule_inside_saves_its_inputs_only(use_reentrant: bool, tmp_path: Path) -> None:
    saved = {}
    for kind in (None, use_reentrant):
        fields = {
            **TRAINERS["scale at block.0/grad_out"],
            "saved_tensors": {"store": "spool", "min_bytes": 0},
        }
        _, results = trained("Layers", kind, fields, tmp_path)
        saved[kind] = results[-1].saved_bytes
    assert saved[use_reentrant] < 0.7 * saved[None]
