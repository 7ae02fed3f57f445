"""Everything together, at random: a trainer that is interrupted and disturbed does what plain torch does."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.oracles.plain_training import PlainTraining, cross_entropy, freeze_all_but
from tests.unit.training.trainers import assert_same, batch_of, batches, core_of, net, run, tiny
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard
from trocar_server.training.losses.batch import Batch
from trocar_server.training.step.core import TrainerCore
from trocar_server.training.step.trainer_state import TrainerState

OPTIMIZERS: list[tuple[str, dict[str, Any], Any]] = [
    ("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, torch.optim.SGD),
    ("adam", {"lr": 0.01}, torch.optim.Adam),
    ("adamw", {"lr": 0.02, "amsgrad": True}, torch.optim.AdamW),
    ("rmsprop", {"lr": 0.01, "momentum": 0.3}, torch.optim.RMSprop),
    ("adagrad", {"lr": 0.05}, torch.optim.Adagrad),
]
PARTS = [["fc"], ["block", "fc"], ["stem"], ["stem", "block", "fc"]]


@pytest.mark.parametrize("seed", range(20))
def test_a_random_trainer(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    name, options, kind = chance.choice(OPTIMIZERS)
    parts = chance.choice(PARTS)
    is_in_backward = chance.random() < 0.25
    accumulation = 1 if is_in_backward else chance.choice([1, 1, 2, 3])
    clip_norm = None if is_in_backward else chance.choice([None, 0.1, 10.0])
    ema_decay = chance.choice([None, 0.9])
    precision = chance.choice(["float32", "bf16"])
    smoothing = chance.choice([0.0, 0.1])
    high = chance.choice([None, 0.01])
    fields: dict[str, Any] = {
        "trainable": parts,
        "seed": seed,
        "optimizer": {"name": name, "options": options, "in_backward": is_in_backward},
        "losses": [{"name": "cross_entropy", "options": {"label_smoothing": smoothing}}],
        "accumulation": accumulation,
        "clip_norm": clip_norm,
        "ema_decay": ema_decay,
        "precision": precision,
        "schedule": {"name": "step", "options": {"step_size": 2, "gamma": 0.5}},
        "activation_checkpointing": chance.choice([[], ["block"], ["stem", "block.0"]]),
        "saved_tensors": {
            "store": chance.choice(["none", "host", "spool"]),
            "budget_bytes": chance.choice([0, 8192]),
            "min_bytes": 0,
        },
        "deterministic": chance.random() < 0.3,
    }
    if high is not None:
        fields["gradient_edits"] = [
            {"selector": "**", "name": "clamp", "options": {"low": -high, "high": high}}
        ]

    base, data = tiny(), batches(12)
    model = copy.deepcopy(net(base))
    freeze_all_but(model, parts)
    for parameter in model.parameters():
        if high is not None and parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient.clamp(-high, high))
    plain = PlainTraining(
        model,
        lambda p: kind(p, **options),
        cross_entropy(label_smoothing=smoothing),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        accumulation,
        clip_norm,
        ema_decay,
        precision,
        seed,
    )
    plain.run(data)

    core = core_of(base, tmp_path / "0", **fields)
    losses: list[float] = []
    for index, pair in enumerate(data):
        if chance.random() < 0.3:
            core = _moved(core, core_of(base, tmp_path / f"{index + 1}", **fields))
        if chance.random() < 0.3:
            _disturb(core, chance)
        losses += [result.loss for result in run(core, [pair])]
    core.close()
    assert losses == plain.losses
    assert_same(core.module, plain.model)
    shown = dict(core.hosted.module.named_parameters())
    averages = dict((plain.average if ema_decay else plain.model).named_parameters())
    assert [path for path in core.trainable if not torch.equal(shown[path], averages[path])] == []


def _moved(core: TrainerCore, other: TrainerCore) -> TrainerCore:
    """Go on in another trainer, by way of a file."""
    state = core.state()
    core.close()
    other.load_state(TrainerState(state.tensors, json.loads(json.dumps(state.facts))))
    return other


def _disturb(core: TrainerCore, chance: random.Random) -> None:
    """Do something that must leave no trace."""
    x, y = batches(1)[0]
    bad = chance.choice([(x[:, :2], y), (x, y + 5), (x * float("inf"), y), (x, y[:2])])
    with pytest.raises(ServiceError):
        core.step(Batch((bad[0],), {}, {"": bad[1]}, len(x)), PassGuard())
    core.evaluate(batch_of((x, y)), PassGuard())
    torch.rand(3)
