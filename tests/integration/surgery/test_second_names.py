"""Modules and parameters that a model has under several names: each name is the same module, as in torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trocar
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt

ROWS = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
TOKENS = np.array([[1, 2, 3], [4, 0, 1]])
LABELS = np.array([0, 2, 1])


class Block(nn.Module):
    """A layer in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.fc(x))
        return x.relu()


class Shared(nn.Module):
    """A block and a head, both called by their second names."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.same = self.block
        self.head = nn.Linear(4, 3)
        self.classifier = self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.classifier(self.same(self.same(x)))
        return out


class SharedOnData(Shared):
    """The same, with a number of calls that depends on the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if (x[0, 0] > -100).item() else self.same(x))


class Tied(nn.Module):
    """Tokens, of which the last layer has the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.middle(self.embed(x)))
        return out


class TiedOnData(Tied):
    """The same, which reads its data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if (x[0, 0] >= 0).item() else x + 1)


SHARED: dict[str, Any] = {"shared": Shared, "shared-on-data": SharedOnData}
TIED: dict[str, Any] = {"tied": Tied, "tied-on-data": TiedOnData}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {name: custom(kind, (4,)) for name, kind in SHARED.items()}
    models |= {
        name: custom(kind, inputs={"x": {"dtype": "int64", "shape": ["batch", "tokens"]}})
        for name, kind in TIED.items()
    }
    with running_server(models=models, device="cpu") as running:
        yield running


def outputs(model: nn.Module, path: str) -> list[Any]:
    """Return what a module returns in plain PyTorch, by call."""
    kept: list[Any] = []
    model.get_submodule(path).register_forward_hook(lambda _, __, out: kept.append(out.detach().numpy()))
    with torch.inference_mode():
        model(torch.from_numpy(ROWS))
    return kept


@pytest.mark.parametrize("model_id", SHARED)
@pytest.mark.parametrize(
    ("selector", "path"),
    [
        ("classifier", "classifier"),
        ("same.fc@1", "same.fc"),
        ("same@-1", "same"),
        ("re:classif.*", "classifier"),
    ],
)
def test_a_second_name_selects_the_module(
    client: trocar.Client, model_id: str, selector: str, path: str
) -> None:
    maps = client.extract(model_id, ROWS, [selector])
    assert np.array_equal(maps[selector], outputs(rebuilt(SHARED[model_id]), path)[-1])
    (streamed,) = client.extract_stream(model_id, [ROWS], [selector])
    assert streamed.maps is not None
    assert np.array_equal(streamed.maps[selector], maps[selector])


@pytest.mark.parametrize("model_id", SHARED)
def test_every_call_of_a_second_name_counts(client: trocar.Client, model_id: str) -> None:
    calls = list(client.extract(model_id, ROWS, ["same@*"]).values())
    expected = outputs(rebuilt(SHARED[model_id]), "block")
    assert [*map(np.array_equal, calls, expected)] == [True, True]


def test_a_pattern_takes_a_module_of_several_names_once(client: trocar.Client) -> None:
    assert list(client.extract("shared", ROWS, ["*ea*", "classifier"])) == ["head"]


def test_parameters_of_a_second_name_are_values(client: trocar.Client) -> None:
    weight = rebuilt(Shared).same.fc.weight.detach().numpy()
    assert np.array_equal(
        client.extract("shared", ROWS, ["same.fc/param(weight)"])["same.fc/param(weight)"], weight
    )


def test_edits_and_gradients_of_a_second_name_are_those_of_hooks(client: trocar.Client) -> None:
    model = rebuilt(Shared)
    model.classifier.register_forward_hook(lambda _, __, out: out * 3)
    rows = torch.from_numpy(ROWS).requires_grad_()
    score = model(rows)[:, 1].square().sum()
    (expected,) = torch.autograd.grad(score, [rows])
    found = client.gradients(
        "shared",
        ROWS,
        of=trocar.value("classifier", function="square", channels=[1]),
        at=["/in"],
        edits=[trocar.edit("classifier", "scale", 3.0)],
    )
    assert np.allclose(found["/in"], expected.numpy(), rtol=1e-5)


def test_an_unknown_name_is_near_to_second_ones_too(client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.UnknownModuleError, match="nearest: classifier"):
        client.extract("shared", ROWS, ["clasifier"])


@pytest.mark.parametrize("model_id", TIED)
@pytest.mark.parametrize(
    ("edited", "tapped"), [("head", "embed"), ("embed", "head"), ("head", "embed/param(weight)")]
)
def test_an_edit_of_a_tied_parameter_is_in_all_its_places(
    client: trocar.Client, model_id: str, edited: str, tapped: str
) -> None:
    model = rebuilt(TIED[model_id])
    with torch.no_grad():
        model.embed.weight.mul_(2.0)
        embedded = model.embed(torch.from_numpy(TOKENS))
        expected = {"embed": embedded, "head": model.head(model.middle(embedded))}.get(
            tapped, model.embed.weight
        )
    edit = trocar.edit(f"{edited}/param(weight)", "scale", 2.0)
    maps = client.extract(model_id, {"x": TOKENS}, [tapped], edits=[edit])
    assert np.array_equal(maps[tapped], expected.detach().numpy())


def test_a_trainer_takes_second_names_everywhere(client: trocar.Client) -> None:
    model = rebuilt(Shared).requires_grad_(True)
    model.same.train()
    rule = trocar.training.gradient_edit("classifier/grad_out", "scale", factor=0.5)
    with client.train(
        "shared",
        trainable=["same"],
        train_mode=["same"],
        losses=[trocar.training.loss_term("cross_entropy", at="classifier")],
        optimizer=trocar.training.sgd(lr=0.1),
        gradient_edits=[rule],
    ) as trainer:
        loss = trainer.forward_backward(ROWS, LABELS).loss
        gradients = trainer.parameter_gradients()
    expected = F.cross_entropy(model(torch.from_numpy(ROWS)), torch.from_numpy(LABELS))
    (expected * 0.5).backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert np.allclose(gradients["block.fc.weight"], model.block.fc.weight.grad.numpy(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("head", [7, trocar.training.head(7, path="classifier")], ids=["found", "named"])
def test_a_new_head_has_both_names(client: trocar.Client, head: Any) -> None:
    with client.train(
        "shared", head=head, losses="cross_entropy", optimizer=trocar.training.sgd(lr=0.1)
    ) as trainer:
        before = trainer.predict(ROWS)
        trainer.step(ROWS, LABELS)
        assert before.shape == (3, 7)
        assert not np.array_equal(trainer.predict(ROWS), before)
