"""Trainers of models with classes in other dimensions than torch's losses take them, against plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import trocar

if TYPE_CHECKING:
    from tests.support.servers.running_server import RunningServer
    from tests.support.servers.serving import Serve

CLASSES, COUNT = 5, 6


class ChannelsLast(nn.Module):
    """Classes of each pixel: (batch, rows, columns, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.stem(x).permute(0, 2, 3, 1).relu())


class Tagger(nn.Module):
    """Classes of each step: (batch, classes, steps)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(4, 8, 3, padding=1)
        self.head = nn.Conv1d(8, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.stem(x).relu())


class TimeFirst(nn.Module):
    """Classes of each step of a sequence (batch, steps, 4), time first: (steps, batch, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.stem(x.transpose(0, 1)).relu())


MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "channels-last": (ChannelsLast, (3, 4, 6), (4, 6), (0, 3, 1, 2)),
    "tagger": (Tagger, (4, 7), (7,), (0, 1, 2)),
    "time-first": (TimeFirst, (7, 4), (7,), (1, 2, 0)),
}
"""Class, shapes of an input and of its labels, and the dimensions of an output as torch takes them."""


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().eval()


@pytest.fixture
def running(serve: Serve, tmp_path: Path) -> RunningServer:
    tables: dict[str, Any] = {
        name: {"factory": f"{__name__}:build", "arguments": [name], "input_shape": shape}
        for name, (_, shape, *_) in MODELS.items()
    }
    return serve(models=tables, data_dir=tmp_path)


def samples(name: str, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    random = np.random.default_rng(seed)
    _, shape, positions, _ = MODELS[name]
    inputs = random.standard_normal((COUNT, *shape)).astype(np.float32)
    return inputs, random.integers(0, CLASSES, (COUNT, *positions))


def scores(model: nn.Module, name: str, inputs: np.ndarray[Any, Any]) -> torch.Tensor:
    output: torch.Tensor = model(torch.from_numpy(inputs))
    return output.permute(MODELS[name][3])


@pytest.mark.parametrize("weights", [None, [1, 2, 0.5, 0, 3]], ids=["equal", "weighted"])
@pytest.mark.parametrize("name", MODELS)
def test_classes_are_where_the_model_has_them(
    client: trocar.Client, tmp_path: Path, name: str, weights: list[float] | None
) -> None:
    inputs, labels = samples(name)
    model = build(name)
    loss = trocar.training.loss_term("cross_entropy", label_smoothing=0.1, class_weights=weights)
    with client.train(name, losses=[loss], optimizer=trocar.training.sgd(lr=0.1)) as trainer:
        value = trainer.step(inputs, labels).loss
        expected = F.cross_entropy(
            scores(model, name, inputs),
            torch.from_numpy(labels),
            None if weights is None else torch.tensor(weights),
            label_smoothing=0.1,
        )
        expected.backward()
        assert value == pytest.approx(expected.item(), rel=1e-6)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        trainer.export(tmp_path / "trained.safetensors")
    for key, weight in load_file(tmp_path / "trained.safetensors").items():
        torch.testing.assert_close(weight, model.state_dict()[key])


@pytest.mark.parametrize("name", MODELS)
def test_metrics_and_names_are_of_the_classes(client: trocar.Client, name: str) -> None:
    inputs, labels = samples(name)
    with client.train(name, losses="cross_entropy", optimizer=trocar.training.sgd(lr=0.1)) as trainer:
        history = trainer.fit((inputs, labels), epochs=1, batch_size=3, eval=samples(name, 1))
        accuracy = np.mean(trainer.predict(inputs).transpose(MODELS[name][3]).argmax(1) == labels)
        assert trainer.evaluate(inputs, labels).accuracy == pytest.approx(accuracy)
        with pytest.raises(trocar.errors.InvalidArgumentError, match="a model with 5 outputs"):
            trainer.publish("named", categories=["a"] * len(labels[0]))
        trainer.publish("named", categories=list("abcde"))
        others, wanted = samples(name, 1)
        found = trainer.predict(others).transpose(MODELS[name][3]).argmax(1)
    assert history.evaluations[-1]["metrics"]["accuracy"] == pytest.approx(np.mean(found == wanted))


@pytest.mark.parametrize("name", MODELS)
def test_a_new_head_has_its_classes_where_the_old_one_had(client: trocar.Client, name: str) -> None:
    inputs, labels = samples(name)
    with client.train(name, head=3, losses="cross_entropy", optimizer=trocar.training.sgd(lr=0.1)) as trainer:
        trainer.step(inputs, labels % 3)
        with pytest.raises(trocar.errors.TargetRejectedError, match="the model has 3 classes"):
            trainer.step(inputs, np.full_like(labels, 4))
        assert trainer.predict(inputs).transpose(MODELS[name][3]).shape[1] == 3


@pytest.mark.parametrize("name", MODELS)
def test_targets_are_of_the_classes(client: trocar.Client, name: str) -> None:
    """Soft targets have the dimensions of the model's output, with the samples first."""
    inputs, labels = samples(name)
    soft = np.eye(CLASSES, dtype=np.float32)[labels] * 0.8 + 0.04  # classes last
    given = np.moveaxis(soft, -1, 1) if name == "tagger" else soft
    expected = F.cross_entropy(scores(build(name), name, inputs), torch.from_numpy(soft).movedim(-1, 1))
    with client.train(name, losses="cross_entropy", optimizer=trocar.training.sgd(lr=0.1)) as trainer:
        assert trainer.step(inputs, given).loss == pytest.approx(expected.item(), rel=1e-6)
    divergence = F.kl_div(
        scores(build(name), name, inputs).log_softmax(1),
        torch.from_numpy(soft).movedim(-1, 1),
        reduction="batchmean",
    )
    with client.train(name, losses="kl_div", optimizer=trocar.training.sgd(lr=0.1)) as trainer:
        assert trainer.step(inputs, given).loss == pytest.approx(divergence.item(), rel=1e-5)
