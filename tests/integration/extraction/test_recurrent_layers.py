"""Recurrent layers against the same model in this process, frozen as the server's is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt

KINDS = ("GRU", "LSTM", "RNN")


class Recurrent(nn.Module):
    """Two layers over (batch, steps, 4); scores from the last state."""

    def __init__(self, cell: str, is_bidirectional: bool) -> None:
        super().__init__()
        make = getattr(nn, cell)
        self.layers = make(4, 5, 2, batch_first=True, bidirectional=is_bidirectional)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.layers(x)[1]
        scores: torch.Tensor = self.head((state[0] if isinstance(state, tuple) else state)[-1])
        return scores


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {
        f"{kind.lower()}-{is_bidirectional:d}": custom(
            Recurrent, (6, 4), options={"cell": kind, "is_bidirectional": is_bidirectional}
        )
        for kind in KINDS
        for is_bidirectional in (False, True)
    }
    with running_server(models=models, device="cpu") as running:
        yield running


@pytest.fixture(params=[(kind, both) for kind in KINDS for both in (False, True)], ids=str)
def case(request: pytest.FixtureRequest) -> tuple[str, str, nn.Module]:
    """A hosted model, the selector of its last states, (layers, batch, width), and the model here."""
    kind, both = request.param
    model = rebuilt(Recurrent, cell=kind, is_bidirectional=both).requires_grad_(False)
    return f"{kind.lower()}-{both:d}", "layers[1][0]" if kind == "LSTM" else "layers[1]", model


def inputs(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((3, 6, 4)).astype(np.float32)


def same(found: np.ndarray[Any, Any], expected: torch.Tensor) -> None:
    """Compare to the last digits, which MKL computes in an order that depends on how memory is aligned."""
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-7)


def states(model: Any, rows: np.ndarray[Any, Any]) -> torch.Tensor:
    found = model.layers(torch.from_numpy(rows))[1]
    state: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return state


def hooked(model: Any, change: Any) -> torch.Tensor:
    """Return the scores of the model with changed states."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        values, state = output
        return values, (change(state[0]), state[1]) if isinstance(state, tuple) else change(state)

    handle = model.layers.register_forward_hook(hook)
    scores: torch.Tensor = model(torch.from_numpy(inputs(0)))
    handle.remove()
    return scores


def test_values_are_those_of_frozen_weights(client: trocar.Client, case: tuple[str, str, nn.Module]) -> None:
    model_id, selector, model = case
    for seed in range(3):
        maps = client.extract(model_id, inputs(seed), [selector, "layers[0]"])
        same(maps[selector], states(model, inputs(seed)))
        values = model.get_submodule("layers")(torch.from_numpy(inputs(seed)))[0]
        same(maps["layers[0]"], values)


def test_samples_of_states_are_in_their_second_dimension(
    client: trocar.Client, case: tuple[str, str, nn.Module]
) -> None:
    model_id, selector, model = case
    state = states(model, inputs(0))
    tap = trocar.tap(selector, stats=["mean"], over="sample", samples=[2, 0])
    maps = client.extract(model_id, inputs(0), [tap])
    same(maps[selector], state[:, [2, 0]])
    np.testing.assert_allclose(maps.stats[selector].mean, state[:, [2, 0]].mean((0, 2)).numpy(), rtol=1e-5)


EDITS: dict[str, tuple[Any, Any]] = {
    "mean_ablate": (
        lambda at: trocar.edit(at, "mean_ablate"),
        lambda state: state.mean(1, keepdim=True).expand_as(state).contiguous(),
    ),
    "zero of a sample": (
        lambda at: trocar.edit(at, "zero", samples=[1]),
        lambda state: state * torch.tensor([1.0, 0.0, 1.0])[None, :, None],
    ),
    "normalise": (
        lambda at: trocar.edit(at, "normalise", 0.5, exact=True),
        lambda state: state * 0.5 / torch.linalg.vector_norm(state, dim=(0, 2), keepdim=True),
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_of_states_are_for_each_sample(
    client: trocar.Client, case: tuple[str, str, nn.Module], name: str
) -> None:
    model_id, selector, model = case
    make, change = EDITS[name]
    found = client.extract(model_id, inputs(0), ["/out"], edits=[make(selector)])["/out"]
    np.testing.assert_allclose(found, hooked(model, change).numpy(), rtol=1e-5, atol=1e-6)


def test_samples_are_exchanged_whole(client: trocar.Client, case: tuple[str, str, nn.Module]) -> None:
    model_id, selector, model = case
    state = states(model, inputs(0)).numpy()
    maps = client.extract(model_id, inputs(0), [selector], edits=[trocar.edit(selector, "resample", seed=1)])
    rows = [[np.allclose(maps[selector][:, i], state[:, j]) for j in range(3)] for i in range(3)]
    assert [sum(row) for row in rows] == [1, 1, 1]
