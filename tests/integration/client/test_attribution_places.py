"""Attributions at values that are no maps of a picture, and of models with several outputs."""

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

CLASS = 1


class Positions(nn.Module):
    """A classifier with a convolution over one to three dimensions."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.conv = kind(3, 4, 3)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.fc(self.conv(x).relu().flatten(2).mean(2))
        return scores


class Steps(Positions):
    """Of sequences."""

    def __init__(self) -> None:
        super().__init__(nn.Conv1d)


class Volumes(Positions):
    """Of volumes."""

    def __init__(self) -> None:
        super().__init__(nn.Conv3d)


class Two(Positions):
    """Of pictures, with two outputs."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d)

    def forward(self, x: torch.Tensor) -> Any:
        scores = super().forward(x)
        return scores, scores[:, :2] * 3


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "steps": (Steps, (3, 9)),
    "volumes": (Volumes, (3, 5, 6, 7)),
    "two": (Two, (3, 8, 8)),
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    tables = {name: custom(kind, shape) for name, (kind, shape) in MODELS.items()}
    with running_server(models=tables, device="cpu") as running:
        yield running


def inputs(name: str) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((2, *MODELS[name][1])).astype(np.float32)


def by_hand(name: str) -> torch.Tensor:
    """Return the class activation map of Grad-CAM's paper."""
    model, kept = rebuilt(MODELS[name][0]), []
    model.conv.register_forward_hook(lambda _, __, out: kept.append(out))
    output = model(torch.from_numpy(inputs(name)))
    scores = output[0] if isinstance(output, tuple) else output
    (gradient,) = torch.autograd.grad(scores[:, CLASS].sum(), kept)
    weights = gradient.flatten(2).mean(2)
    return torch.einsum("bc,bc...->b...", weights, kept[0]).relu().detach()


@pytest.mark.parametrize("name", ["steps", "volumes"])
def test_class_activation_maps_have_the_positions_of_the_value(client: trocar.Client, name: str) -> None:
    found = client.grad_cam(name, inputs(name), at="conv", of=trocar.logit(CLASS))
    np.testing.assert_allclose(found.values, by_hand(name).numpy(), rtol=1e-4, atol=1e-6)


METHODS: list[tuple[Any, dict[str, Any]]] = [
    ("grad_cam", {"at": "conv"}),
    ("saliency", {}),
    ("occlusion", {}),
    ("integrated_gradients", {"steps": 2}),
]


@pytest.mark.parametrize(("method", "options"), METHODS)
@pytest.mark.parametrize("of", [None, trocar.logit(CLASS)], ids=["predicted", "chosen"])
def test_of_several_outputs_one_is_to_be_named(
    client: trocar.Client, method: Any, options: dict[str, Any], of: trocar.Objective | None
) -> None:
    with pytest.raises((ValueError, trocar.errors.ObjectiveRejectedError)) as caught:
        client.attribute("two", inputs("two"), method, of=of, **options)
    assert 'at="/out[0]"' in str(caught.value)
    assert "alias" not in str(caught.value)


def test_scores_are_of_the_named_output(client: trocar.Client) -> None:
    of = trocar.logit(CLASS, at="/out[0]")
    found = client.grad_cam("two", inputs("two"), at="conv", of=of)
    np.testing.assert_allclose(found.values, by_hand("two").numpy(), rtol=1e-4, atol=1e-6)
    expected = rebuilt(Two)(torch.from_numpy(inputs("two")))[0][:, CLASS].detach().numpy()
    assert found.scores is not None
    np.testing.assert_allclose(found.scores, expected, rtol=1e-5)
