"""Models that keep what they compute from their weights, as LeViT does: calls see no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trocar
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom, rebuilt

ROWS = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
LABELS = np.array([0, 2, 1])
EDITS = [trocar.edit("/param(bias)", "scale", 3.0)]


class Keeps(nn.Module):
    """Keeps a function of its weights in an attribute, in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 3)
        self.kept: torch.Tensor | None = None

    def doubled(self) -> torch.Tensor:
        if self.training:
            return self.bias * 2
        if self.kept is None or self.kept.device != self.bias.device:
            self.kept = self.bias * 2
        return self.kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(x + self.doubled())
        return scores


class KeepsByDevice(Keeps):
    """The same in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.by_device: dict[str, torch.Tensor] = {}

    def doubled(self) -> torch.Tensor:
        if self.training:
            return self.bias * 2
        return self.by_device.setdefault(str(self.bias.device), self.bias * 2)


KINDS: dict[str, Any] = {"attribute": Keeps, "dictionary": KeepsByDevice}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[trocar.Client]:
    """Of a server of its own: which call is the first one matters."""
    models = {name: custom(kind, (4,)) for name, kind in KINDS.items()}
    with (
        running_server(models=models, device="cpu", data_dir=tmp_path) as running,
        trocar.connect(running.address) as connected,
    ):
        yield connected


def scores(model: Any, factor: float = 1.0) -> torch.Tensor:
    """Return the scores of a model whose bias is multiplied, without what it keeps."""
    found: torch.Tensor = model.head(torch.from_numpy(ROWS) + model.bias * factor * 2)
    return found


def same(found: np.ndarray[Any, Any], expected: torch.Tensor) -> None:
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("is_edited_first", [True, False])
def test_an_edit_of_weights_is_of_its_own_call(
    client: trocar.Client, name: str, is_edited_first: bool
) -> None:
    model = rebuilt(KINDS[name])
    for edits in [EDITS, [], EDITS, []] if is_edited_first else [[], EDITS, [], EDITS]:
        same(client.extract(name, ROWS, ["/out"], edits=edits)["/out"], scores(model, 3.0 if edits else 1.0))


@pytest.mark.parametrize("name", KINDS)
def test_gradients_reach_the_weights(client: trocar.Client, name: str) -> None:
    model = rebuilt(KINDS[name])
    client.extract(name, ROWS, ["/out"])
    (expected,) = torch.autograd.grad(scores(model)[:, 1].sum(), model.bias)
    found = client.gradients(name, ROWS, of=trocar.logit(1), at=["/param(bias)"])
    same(found["/param(bias)"], expected)


@pytest.mark.parametrize("name", KINDS)
def test_calls_on_a_trainer_see_its_steps(client: trocar.Client, name: str) -> None:
    model = rebuilt(KINDS[name])
    with client.train(name, losses="cross_entropy", optimizer=trocar.training.sgd(lr=1.0)) as trainer:
        same(trainer.predict(ROWS), scores(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(2):
            trainer.step(ROWS, LABELS)
            optimizer.zero_grad()
            F.cross_entropy(scores(model), torch.from_numpy(LABELS)).backward()
            optimizer.step()
            same(trainer.predict(ROWS), scores(model))
            same(trainer.extract(ROWS, ["/out"])["/out"], scores(model))
            loss = F.cross_entropy(scores(model), torch.from_numpy(LABELS)).item()
            assert trainer.evaluate(ROWS, LABELS).loss == pytest.approx(loss, rel=1e-5)
    same(client.extract(name, ROWS, ["/out"])["/out"], scores(rebuilt(KINDS[name])))


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_a_module_that_its_owner_trains_is_hosted_as_it_is_now(kind: Any) -> None:
    model = kind().eval()
    with trocar.connect("local", models={"own": {"module": model, "input_shape": (4,)}}) as client:
        for _ in range(2):
            same(client.extract("own", ROWS, ["/out"])["/out"], scores(model))
            with torch.no_grad():
                model.bias.mul_(2)
