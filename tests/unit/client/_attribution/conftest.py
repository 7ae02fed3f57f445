"""Attributions of torch modules in this process, through the methods of both clients."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.oracles.torch_client import AsyncTorchClient, TorchClient
from trocar._base.tensors import Array

Ask = Callable[..., trocar.Attribution]


@pytest.fixture(params=["sync", "aio"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Calls `attribute` or `grad_cam` of a client that hosts one model, "m"; of both kinds of clients."""

    def call(model: nn.Module, method: str, *arguments: Any, **options: Any) -> trocar.Attribution:
        is_sync = request.param == "sync"
        client: Any = (TorchClient if is_sync else AsyncTorchClient)({"m": model}, categories=NAMES)
        answer = getattr(client, method)("m", *arguments, **options)
        found: trocar.Attribution = answer if is_sync else asyncio.run(answer)
        return found

    return call


NAMES = ("ant", "bee", "cat", "dog", "eel")


@pytest.fixture
def model() -> nn.Module:
    """A convolutional net with an in-place ReLU that is called twice; five classes."""
    torch.manual_seed(0)
    return Plain().eval()


def images(count: int = 3, size: tuple[int, int] = (12, 10), seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, 3, *size)).astype(np.float32)


def tensor(x: Array) -> torch.Tensor:
    return torch.from_numpy(x.copy()).requires_grad_()


def predicted(model: nn.Module, x: Array) -> torch.Tensor:
    classes: torch.Tensor = model(torch.from_numpy(x)).argmax(1)
    return classes


def same(found: Array, expected: Any) -> None:
    """Equal to 1e-5, relative to the largest value."""
    wanted = expected.detach().numpy() if isinstance(expected, torch.Tensor) else np.asarray(expected)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * float(np.abs(wanted).max(initial=0)))
