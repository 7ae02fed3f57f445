"""Models that PyTorch's inference mode does not suit: derivatives in the forward, tensors kept in caches."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.support.oracles.oracle import noise

ROWS = noise(2, 4)


class Forces(nn.Module):
    """Returns an energy, and its negative derivative by the input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.fc(x).tanh().sum()
            (force,) = torch.autograd.grad(energy, x)
        return {"energy": energy, "forces": -force}


class Table:
    """Makes a tensor when it is first asked for one."""

    def __init__(self) -> None:
        self.cos: torch.Tensor | None = None

    def of(self, size: int) -> torch.Tensor:
        if self.cos is None:
            self.cos = torch.cos(torch.arange(float(size)))
        return self.cos


@functools.lru_cache(maxsize=8)
def table_of(size: int, device: torch.device) -> torch.Tensor:
    """Return a tensor that is made once in a process."""
    return torch.cos(torch.arange(float(size), device=device))


class Keeping(nn.Module):
    """Multiplies by a tensor of an object of its own, or of a function's cache."""

    def __init__(self, *, is_function: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.table = nn.Linear(4, 4), Table()
        self.is_function = is_function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = table_of(4, x.device) if self.is_function else self.table.of(4)
        result: torch.Tensor = self.fc(x) * factor
        return result


def models() -> dict[str, Any]:
    return {
        "forces": Forces().eval(),
        "object": Keeping(is_function=False).eval(),
        "function": Keeping(is_function=True).eval(),
    }


@pytest.fixture(scope="module")
def client() -> Iterator[trocar.Client]:
    hosted = {name: {"module": module, "input_shape": (4,)} for name, module in models().items()}
    with trocar.connect("local", models=hosted, options={"device": "cpu"}) as connected:
        yield connected


def test_a_model_that_derives_in_its_forward_is_served(client: trocar.Client) -> None:
    model = Forces().eval()
    expected = model(torch.from_numpy(ROWS))
    for _ in range(2):
        found = client.extract("forces", ROWS, ['/out["forces"]', '/out["energy"]', "fc"])
        assert np.allclose(found['/out["forces"]'], expected["forces"].numpy(), atol=1e-6)
        assert np.allclose(found['/out["energy"]'], expected["energy"].detach().numpy(), atol=1e-6)
        assert np.allclose(found["fc"], model.fc(torch.from_numpy(ROWS)).detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("name", ["object", "function"])
def test_gradients_after_an_extract_of_a_model_that_keeps_a_tensor(client: trocar.Client, name: str) -> None:
    weight = models()[name].fc.weight.detach().numpy()
    expected = np.tile(np.cos(np.arange(4.0, dtype=np.float32)) @ weight, (2, 1))
    table_of.cache_clear()
    for _ in range(2):
        client.extract(name, ROWS, "/out")
        found = client.gradients(name, ROWS, of=trocar.value("/out"), at="/in")
        assert np.allclose(found["/in"], expected, atol=1e-6)
