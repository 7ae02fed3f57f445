"""Skipped modules of a model that reads its data, so that its calls are counted in each pass."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.support.oracles.oracle import noise

ROWS = noise(2, 4)


class Layer(nn.Module):
    """Two linear layers around a tanh, beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.mlp(self.attn(x).tanh())
        return result


class Reads(nn.Module):
    """Looks at its input before three layers, so that it is recorded on data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers: Any = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.isnan().any()):
            x = x.nan_to_num()
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def client() -> Iterator[trocar.Client]:
    models = {"reads": {"module": Reads().eval(), "input_shape": (4,)}}
    with trocar.connect("local", models=models, settings={"device": "cpu"}) as connected:
        yield connected


@pytest.mark.parametrize(
    ("tap", "names"),
    [
        ("layers.*.attn", ("layers.0.attn", "layers.2.attn")),
        ("layers.2.attn@-1", ("layers.2.attn",)),
        ("layers.2", ("layers.2",)),
        ("#-1", ("layers.2.mlp",)),
    ],
)
def test_calls_inside_of_what_is_skipped_are_not_expected(
    client: trocar.Client, tap: str, names: tuple[str, ...]
) -> None:
    found = client.extract("reads", ROWS, [tap], edits=[trocar.edit("layers.1", "skip")])
    model, expected = Reads().eval(), dict[str, torch.Tensor]()
    model.layers[1] = nn.Identity()
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_hook(lambda _, __, output, name=name: expected.update({name: output}))
    with torch.inference_mode():
        model(torch.from_numpy(ROWS))
    assert tuple(found) == names
    for name in names:
        assert np.array_equal(found[name], expected[name].numpy())
