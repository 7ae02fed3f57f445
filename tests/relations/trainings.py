"""Steps of trainers on other ways: equal bits of losses, gradients' norms and predictions.

| way | how |
|---|---|
| `restored` | a step is made, undone by `restore`, and made again |
| `reopened` | the trainer is opened again on a restarted server |
| `spooled` | saved tensors are on disk |
| `recomputed` | values are recomputed in the backward pass |
| `reentrant`, `not reentrant` | the model checkpoints a module itself, in one of torch's two ways |
| `in two calls` | `forward_backward`, then `optimizer_step` |
| `fitted` | the steps are those of a fit over the same batches |
| `kept features` | the same, with the outputs of frozen modules computed once |
| `killed` | the server is killed (SIGKILL) after a step that no checkpoint has |
| `killed in a fit` | the server is killed while a fit runs, which goes on after a restart |
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from torch import nn
from torch.utils.checkpoint import checkpoint

import trocar
from tests.relations.families import FAMILIES
from tests.relations.family import Family, Inputs
from tests.relations.hosting import tables
from tests.relations.outcome import Outcome
from tests.relations.replies import same_bits
from tests.support.servers.running_server import running_server
from tests.support.servers.server_processes import ServerProcesses

TRAINED = ("resnet", "vit", "last-state", "volume", "convnext", "masked-encoder")
"""Families with classes, of kinds whose modules keep something: batch norm, dropout, states."""
_STEPS = 3


@dataclass
class Restartable:
    """A server that may be started again over the same folder: `restart` returns a client of the next one."""

    client: trocar.Client
    restart: Callable[[], trocar.Client]


@contextmanager
def trainable(folder: Path, names: tuple[str, ...] = TRAINED) -> Iterator[Restartable]:
    """Host families to train in this process; it is stopped before it is started again."""
    models = {**tables(names), **_checkpointing(names)}
    with _restartable(lambda: _running(folder, models)) as hosts:
        yield hosts


@contextmanager
def killable(
    folder: Path, processes: ServerProcesses, names: tuple[str, ...] = TRAINED
) -> Iterator[Restartable]:
    """Host families to train in a process of their own; it is killed before it is started again."""
    with _restartable(lambda: _process(folder, processes, tables(names))) as hosts:
        yield hosts


@contextmanager
def _running(folder: Path, models: dict[str, Any]) -> Iterator[str]:
    with running_server(models=models, device="cpu", data_dir=folder) as server:
        yield server.address


@contextmanager
def _process(folder: Path, processes: ServerProcesses, models: dict[str, Any]) -> Iterator[str]:
    server = processes.start(folder, models=models)
    try:
        yield server.address
    finally:
        server.kill()


@contextmanager
def _restartable(serve: Callable[[], Any]) -> Iterator[Restartable]:
    contexts: list[Any] = []

    def start() -> trocar.Client:
        stop()
        contexts.append(serve())
        contexts.append(trocar.connect(contexts[0].__enter__(), timeout_s=600, retries=0))
        return contexts[1].__enter__()  # type: ignore[no-any-return]

    def restart() -> trocar.Client:
        hosts.client = start()
        return hosts.client

    def stop() -> None:
        while contexts:
            contexts.pop().__exit__(None, None, None)

    try:
        hosts = Restartable(start(), restart)
        yield hosts
    finally:
        stop()


def _checkpointing(names: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration of the families that checkpoint a module themselves."""
    return {
        f"{name}-{way.replace(' ', '-')}": {
            **table,
            "factory": f"{__name__}:checkpointing",
            "arguments": [name, way == "reentrant"],
        }
        for name, table in tables(names).items()
        for way in ("reentrant", "not reentrant")
    }


def checkpointing(name: str, use_reentrant: bool) -> nn.Module:
    """Return the model of a family that checkpoints one of its modules."""
    module = FAMILIES[name].build()
    part = module.get_submodule(RECOMPUTED[name])
    part.forward = partial(_checkpointed, part.forward, use_reentrant)  # no closure: trainers copy it
    return module


def _checkpointed(usual: Callable[..., Any], use_reentrant: bool, *args: Any, **named: Any) -> Any:
    return checkpoint(partial(usual, **named), *args, use_reentrant=use_reentrant)


def _options(chance: Random, name: str) -> dict[str, Any]:
    rate = chance.choice([0.01, 0.05])
    optimizers = [
        trocar.training.sgd(lr=rate, momentum=0.9),
        trocar.training.adamw(lr=rate),
        trocar.training.rmsprop(lr=rate),
    ]
    chosen = {"optimizer": chance.choice(optimizers), "seed": chance.randrange(9)}
    more: list[dict[str, Any]] = [
        {},
        {"clip_norm": 0.5},
        {"ema_decay": 0.9},
        {"trainable": HEADS[name]},
        {"gradient_edits": [trocar.training.gradient_edit("**", "clamp", -0.01, 0.01)]},
        {"accumulation": 1, "losses": [trocar.training.loss_term("cross_entropy", label_smoothing=0.1)]},
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


def _fitted(
    hosts: Restartable, trainer: Any, batches: list[Any], *, keeps: bool = False, kills: bool = False
) -> list[Any]:
    """Fit on the first batches, which the others repeat; with `keeps`, frozen values must be kept."""
    inputs, targets = map(np.concatenate, zip(*batches[:_STEPS], strict=True))
    options: Any = {"epochs": len(batches) // _STEPS, "batch_size": len(batches[0][1]), "shuffle": False}
    trainer.start_fit((inputs, targets), feature_cache=keeps, checkpoint_every=2, **options)
    if kills:
        with suppress(trocar.TrocarError):
            next(event for event in trainer.watch() if event.kind == "step" and event["step"] == 3)
        trainer = hosts.restart().trainer(trainer.trainer_id)
    history = trainer.wait(0, progress=False)
    if keeps and not history.of_kind("cache")[-1]["done"]:
        raise AssertionError(f"nothing was kept: {history.of_kind('cache')}")
    losses = [np.float64(event["loss"]) for event in history.of_kind("step")]
    predicted = trainer.predict(batches[-1][0])
    trainer.close()
    return [*losses, predicted]


def _killed(hosts: Restartable, trainer: Any, batches: list[Any]) -> list[Any]:
    first = _step(trainer, batches[0])
    trainer.save()
    _step(trainer, batches[2])
    again = hosts.restart().trainer(trainer.trainer_id)
    return first + _usual(hosts, again, batches[1:])


_Way = Callable[[Restartable, Any, list[Any]], list[Any]]
WAYS: dict[str, tuple[_Way, dict[str, Any]]] = {
    "restored": (_restored, {}),
    "reopened": (_reopened, {}),
    "spooled": (_usual, {"saved_tensors": trocar.training.save_on_disk(budget_bytes=0, min_bytes=0)}),
    "recomputed": (_usual, {"activation_checkpointing": True}),
    "reentrant": (_usual, {}),
    "not reentrant": (_usual, {}),
    "in two calls": (_in_two_calls, {}),
    "fitted": (_fitted, {}),
    "kept features": (partial(_fitted, keeps=True), {}),
}
"""The ways: what is called, and with which further options."""

KILLED: dict[str, tuple[_Way, dict[str, Any]]] = {
    "killed": (_killed, {}),
    "killed in a fit": (partial(_fitted, kills=True), {}),
}
"""The ways that need a server of `killable`."""
FITTED = {"fitted": 2, "kept features": 2, "killed in a fit": 15}
"""The ways that train on arrays, and how often they go through them."""

RECOMPUTED = {
    "resnet": "layer2",
    "vit": "encoder.layers.encoder_layer_0",
    "last-state": "gru",
    "volume": "conv",
    "convnext": "features.1.0",
    "masked-encoder": "encoder.layers.0",
}
"""The module whose values are recomputed, by family."""


HEADS = {
    "resnet": "fc",
    "vit": "heads",
    "last-state": "head",
    "volume": "head",
    "convnext": "classifier",
    "masked-encoder": "head",
}
"""What is trained where the rest is frozen, by family."""


def is_possible(way: str, name: str) -> bool:
    """Whether a family may be trained in this way: a data set of arrays has one input."""
    return way not in FITTED or len(FAMILIES[name].axes) == 1


def training(way: str, hosts: Restartable, name: str, chance: Random) -> Outcome:
    """Compare the steps of a trainer with those on another way."""
    family, options = FAMILIES[name], _options(chance, name)
    options |= {"trainable": HEADS[name]} if way == "kept features" else {}
    batches = [_batch(family, chance) for _ in range(_STEPS)]
    outcome = Outcome(f"training {way}", name)
    call, more = {**WAYS, **KILLED}[way]
    more = {**more, **({"activation_checkpointing": [RECOMPUTED[name]]} if way == "recomputed" else {})}
    model_id = f"{name}-{way.replace(' ', '-')}" if way.endswith("reentrant") else name
    if way in FITTED:
        batches = [(next(iter(inputs.values())), targets) for inputs, targets in batches] * FITTED[way]
    mine = _usual(hosts, hosts.client.train(name, **options), batches)
    theirs = call(hosts, hosts.client.train(model_id, **options, **more), batches)
    for number, (one, two) in enumerate(zip(mine, theirs, strict=True)):
        outcome.comparison.note(("", f"number {number}"), one, two, same_bits)
    return outcome


def _batch(family: Family, chance: Random) -> tuple[Any, Any]:
    inputs = family.inputs(np.random.default_rng(chance.randrange(10**6)), 4)
    return inputs, np.array([chance.randrange(family.classes) for _ in range(4)])
