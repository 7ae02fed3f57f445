"""Steps of trainers on other ways: equal bits of losses, gradients' norms and predictions.

| way | how |
|---|---|
| `restored` | a step is made, undone by `restore`, and made again |
| `reopened` | the trainer is opened again on a restarted server |
| `spooled` | saved tensors are on disk |
| `recomputed` | values are recomputed in the backward pass |
| `in two calls` | `forward_backward`, then `optimizer_step` |
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import trocar
from tests.relations.families import FAMILIES
from tests.relations.family import Family, Inputs
from tests.relations.hosting import tables
from tests.relations.outcome import Outcome
from tests.relations.replies import same_bits
from tests.support.servers.running_server import running_server

TRAINED = ("resnet", "vit", "last-state", "volume", "convnext", "masked-encoder")
"""Families with classes, of kinds whose modules keep something: batch norm, dropout, states."""
_STEPS = 3


@dataclass
class Restartable:
    """A server that may be started again over the same folder."""

    folder: Path
    client: trocar.Client
    restart: Callable[[], trocar.Client]


@contextmanager
def trainable(folder: Path, names: tuple[str, ...] = TRAINED) -> Iterator[Restartable]:
    """Host families to train, for the length of the context."""
    contexts: list[Any] = []

    def start() -> trocar.Client:
        stop()
        server = running_server(models=tables(names), device="cpu", data_dir=folder)
        contexts.append(server)
        client = trocar.connect(server.__enter__().address, timeout_s=600, retries=0)
        contexts.append(client)
        return client.__enter__()

    def stop() -> None:
        while contexts:
            contexts.pop().__exit__(None, None, None)

    try:
        hosts = Restartable(folder, start(), lambda: hosts.client)

        def restart() -> trocar.Client:
            hosts.client = start()
            return hosts.client

        hosts.restart = restart
        yield hosts
    finally:
        stop()


def _options(chance: Random) -> dict[str, Any]:
    rate = chance.choice([0.01, 0.05])
    optimizers = [trocar.sgd(lr=rate, momentum=0.9), trocar.adamw(lr=rate), trocar.rmsprop(lr=rate)]
    chosen = {"optimizer": chance.choice(optimizers), "seed": chance.randrange(9)}
    more: list[dict[str, Any]] = [
        {},
        {"clip_norm": 0.5},
        {"ema_decay": 0.9},
        {"gradient_rules": [trocar.clamp("**", -0.01, 0.01)]},
        {"accumulation": 1, "losses": [trocar.loss_term("cross_entropy", label_smoothing=0.1)]},
    ]
    return {**chosen, **chance.choice(more)}


def _step(trainer: Any, batch: tuple[Inputs, Any]) -> list[Any]:
    result = trainer.step(*batch)
    return [np.float64(result.loss)]


def _usual(_: Restartable, trainer: Any, batches: list[Any]) -> list[Any]:
    """Return the losses of steps, then what the trained model predicts."""
    losses = [number for batch in batches for number in _step(trainer, batch)]
    predicted = trainer.predict(batches[-1][0])
    trainer.close()
    return [*losses, predicted]


def _restored(hosts: Restartable, trainer: Any, batches: list[Any]) -> list[Any]:
    first = _step(trainer, batches[0])
    trainer.save()
    _step(trainer, batches[2])
    trainer.restore()
    return first + _usual(hosts, trainer, batches[1:])


def _reopened(hosts: Restartable, trainer: Any, batches: list[Any]) -> list[Any]:
    first = _step(trainer, batches[0])
    trainer.save()
    again = hosts.restart().trainer(trainer.trainer_id)
    return first + _usual(hosts, again, batches[1:])


def _in_two_calls(_: Restartable, trainer: Any, batches: list[Any]) -> list[Any]:
    losses = []
    for batch in batches:
        losses.append(np.float64(trainer.forward_backward(*batch).loss))
        trainer.optimizer_step()
    predicted = trainer.predict(batches[-1][0])
    trainer.close()
    return [*losses, predicted]


_Way = Callable[[Restartable, Any, list[Any]], list[Any]]
WAYS: dict[str, tuple[_Way, dict[str, Any]]] = {
    "restored": (_restored, {}),
    "reopened": (_reopened, {}),
    "spooled": (_usual, {"saved_tensors": trocar.spool(budget_bytes=0, min_bytes=0)}),
    "recomputed": (_usual, {"activation_checkpointing": True}),
    "in two calls": (_in_two_calls, {}),
}
"""The ways: what is called, and with which further options."""

RECOMPUTED = {
    "resnet": "layer2",
    "vit": "encoder.layers.encoder_layer_0",
    "last-state": "gru",
    "volume": "conv",
    "convnext": "features.1.0",
    "masked-encoder": "encoder.layers.0",
}
"""The module whose values are recomputed, by family."""


def training(way: str, hosts: Restartable, name: str, chance: Random) -> Outcome:
    """Compare the steps of a trainer with those on another way."""
    family, options = FAMILIES[name], _options(chance)
    batches = [_batch(family, chance) for _ in range(_STEPS)]
    outcome = Outcome(f"training {way}", name)
    call, more = WAYS[way]
    more = {**more, **({"activation_checkpointing": [RECOMPUTED[name]]} if way == "recomputed" else {})}
    mine = _usual(hosts, hosts.client.train(name, **options), batches)
    theirs = call(hosts, hosts.client.train(name, **options, **more), batches)
    for number, (one, two) in enumerate(zip(mine, theirs, strict=True)):
        outcome.comparison.note(("", f"number {number}"), one, two, same_bits)
    return outcome


def _batch(family: Family, chance: Random) -> tuple[Any, Any]:
    inputs = family.inputs(np.random.default_rng(chance.randrange(10**6)), 4)
    return inputs, np.array([chance.randrange(family.classes) for _ in range(4)])
