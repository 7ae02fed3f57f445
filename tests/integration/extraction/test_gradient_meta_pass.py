"""A request for gradients has a meta pass: one for each signature, and its memory is known from it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trocar

BACKWARD: list[str] = []
"""The device of each backward pass that came through `Noting`."""


class Noting(torch.autograd.Function):
    """Passes on, and notes where its gradient is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        BACKWARD.append(gradients[0].device.type)
        return gradients[0]


class Deep(nn.Module):
    """Layers whose values a backward pass needs all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> Any:
        return Noting.apply(self.layers(x))


@pytest.fixture(scope="module")
def client() -> Iterator[trocar.Client]:
    models = {"deep": {"module": Deep(), "input_shape": (64,)}}
    with trocar.connect("local", models=models, settings={"device": "cpu"}) as connected:
        yield connected


@pytest.mark.parametrize(
    "edits", [[], [trocar.edit("layers/grad_out", "scale", 2.0)]], ids=["plain", "edited"]
)
def test_a_signature_has_one_meta_pass(client: trocar.Client, edits: list[trocar.Edit]) -> None:
    devices = []
    for batch in (2, 2, 3):
        BACKWARD.clear()
        client.gradients("deep", np.ones((batch, 64), np.float32), of=trocar.value("/out"), edits=edits)
        devices.append(list(BACKWARD))
    assert devices == [["meta", "cpu"], ["cpu"], ["meta", "cpu"]]


def test_the_memory_of_a_backward_pass_is_planned(client: trocar.Client) -> None:
    shape = (1024, 64)
    forward = client.plan("deep", shape, "/out")
    backward = client.plan("deep", shape, "/grad_in", of=trocar.value("/out"))
    one = 1024 * 64 * 4
    assert forward.memory_bytes < 6 * one
    assert backward.memory_bytes >= 8 * one  # what the eight `tanh` keep
