"""Models with parts in TorchScript: each part is one module, with the values and gradients of plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt

ROWS = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
LABELS = np.array([0, 2, 1])


def compiled(module: nn.Module, how: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.jit.script(module) if how == "script" else torch.jit.trace(module, torch.zeros(2, 4))


class PartlyScripted(nn.Module):
    """A model with a compiled part, which has weights and statistics."""

    def __init__(self, how: str = "script") -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.part = compiled(inner.eval(), how)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.part(self.first(x)))
        return scores


@pytest.fixture(scope="module", params=["script", "trace"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(how: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = {
        "partly": custom(PartlyScripted, (4,), options={"how": how}),
        "other": custom(PartlyScripted, (4,), options={"how": how}, weights="random:1"),
    }
    with running_server(models=models, device="cpu", data_dir=tmp_path_factory.mktemp("data")) as running:
        yield running


def kept(how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input and output of the part in plain torch, with a graph."""
    model = rebuilt(PartlyScripted, how=how)
    given = model.first(torch.from_numpy(ROWS)).detach().requires_grad_()
    return given, model.part(given)


def test_a_part_is_one_module(client: trocar.Client, how: str) -> None:
    given, returned = kept(how)
    maps = client.extract("partly", ROWS, ["part/in", "part", "/out"])
    np.testing.assert_array_equal(maps["part/in"], given.detach().numpy())
    np.testing.assert_array_equal(maps["part"], returned.detach().numpy())
    expected = rebuilt(PartlyScripted, how=how)(torch.from_numpy(ROWS))
    np.testing.assert_array_equal(maps["/out"], expected.detach().numpy())
    assert client.plan("partly", (7, 4), ["part"]).is_symbolic
    assert [module.path for module in client.modules("partly")] == ["", "first", "part", "head"]


def test_gradients_go_through_a_part(client: trocar.Client, how: str) -> None:
    model, (given, returned) = rebuilt(PartlyScripted, how=how), kept(how)
    (expected,) = torch.autograd.grad(model.head(returned)[:, 1].sum(), given)
    found = client.gradients("partly", ROWS, of=trocar.logit(1), at=["first"])
    np.testing.assert_allclose(found["first"], expected.numpy(), rtol=1e-5, atol=1e-7)


def test_a_part_can_be_edited(client: trocar.Client, how: str) -> None:
    found = client.extract("partly", ROWS, ["/out"], edits=[trocar.edit("part", "zero")])["/out"]
    bias = rebuilt(PartlyScripted, how=how).head.bias.detach().numpy()
    np.testing.assert_array_equal(found, np.broadcast_to(bias, (3, 3)))


def test_the_rest_of_the_model_is_trained(client: trocar.Client) -> None:
    with client.train("partly", losses="cross_entropy", optimizer=trocar.training.sgd(lr=0.1)) as trainer:
        assert {name.partition(".")[0] for name in trainer.info().trainable} == {"first", "head"}
        before = trainer.extract(ROWS, ["part"])["part"]
        first = trainer.step(ROWS, LABELS).loss
        assert trainer.step(ROWS, LABELS).loss < first
        assert not np.array_equal(trainer.extract(ROWS, ["part"])["part"], before)


def test_weights_of_a_part_are_in_the_digest(client: trocar.Client) -> None:
    digests = [client.model(name, has_digest=True).digest for name in ("partly", "other", "partly")]
    assert digests[0] == digests[2] != digests[1]


def test_a_model_in_torchscript_is_refused_with_what_to_host() -> None:
    for scripted in ("script", "trace"):
        with (
            pytest.raises(trocar.errors.ModelInvalidError, match=r"host the nn\.Module that it was made of"),
            trocar.connect("local", models={"whole": compiled(nn.Linear(4, 4), scripted)}),
        ):
            pass
