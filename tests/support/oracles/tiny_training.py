"""Trainers of the tiny net on a server, and the same steps in plain torch."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

import trocar
from tests.support.models.trainable_nets import CLASSES, SHAPE, TinyNet
from tests.support.servers.serving import custom, rebuilt

SEED = 7
MODELS: dict[str, Any] = {"tiny": custom(TinyNet, SHAPE)}
Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def samples(count: int, seed: int = 3) -> Arrays:
    random = np.random.default_rng(seed)
    return random.normal(size=(count, *SHAPE)).astype(np.float32), np.arange(count) % CLASSES


def batches(count: int, size: int = 4) -> list[Arrays]:
    return [samples(size, seed) for seed in range(count)]


def make_trainer(client: trocar.Client, **options: Any) -> trocar.training.Trainer:
    chosen: dict[str, Any] = {"optimizer": trocar.training.sgd(lr=0.05, momentum=0.9), "seed": SEED}
    return client.train("tiny", **{**chosen, **options})


class PlainTrainer:
    """What a trainer of the tiny net does, as plain torch; several threads may step, each its own."""

    _alone = threading.Lock()
    """The generator of dropout belongs to the process."""

    def __init__(self) -> None:
        with self._alone:
            self.model = rebuilt(TinyNet).train()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self._random = torch.Generator().manual_seed(SEED).get_state()

    def step(self, batch: Arrays) -> float:
        with self._alone, torch.random.fork_rng():
            torch.set_rng_state(self._random)
            self._optimizer.zero_grad()
            loss = cross_entropy(self.model(torch.from_numpy(batch[0])), torch.from_numpy(batch[1]))
            loss.backward()
            self._optimizer.step()
            self._random = torch.get_rng_state()
        return loss.item()


def stepped_plainly(given: Sequence[Arrays]) -> nn.Module:
    plain = PlainTrainer()
    for batch in given:
        plain.step(batch)
    model: nn.Module = plain.model
    return model


def fitted_plainly(data: Arrays, epochs: int, batch_size: int) -> tuple[nn.Module, list[float]]:
    """Run a fit; returns the model, and the loss of each step."""
    plain, losses = PlainTrainer(), []
    for epoch in range(epochs):
        order = torch.randperm(len(data[1]), generator=torch.Generator().manual_seed(SEED + epoch))
        for indices in order.split(batch_size):
            losses.append(plain.step((data[0][indices], data[1][indices])))
    return plain.model, losses


def assert_weights(trainer: trocar.training.Trainer, expected: nn.Module, folder: Path) -> None:
    """Compare every tensor of an export, bit by bit."""
    found = load_file(trainer.export(folder / "exported.safetensors"))
    state = expected.state_dict()
    assert found.keys() == state.keys()
    assert [name for name, value in state.items() if not torch.equal(value, found[name])] == []
