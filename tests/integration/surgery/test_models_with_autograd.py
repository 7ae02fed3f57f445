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


class ShiftedForces(nn.Module):
    """Writes to its input, then derives: a pass that fails at the second has done the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Identity(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).sub_(1.0)
        with torch.enable_grad():
            y = x.detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad((y**3).sum(), y)
        result: torch.Tensor = self.last(gradient)
        return result


class ChoosesByData(ShiftedForces):
    """Calls its modules as often as the data says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if float(x.sum()) > -1e9 else x


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


class ShiftedKeeping(Keeping):
    """Writes to its input, then fails where the function's cache holds a tensor of inference mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.sub_(1.0))


def models() -> dict[str, Any]:
    return {
        "forces": Forces().eval(),
        "shifted": ShiftedForces().eval(),
        "chooses": ChoosesByData().eval(),
        "object": Keeping(is_function=False).eval(),
        "function": Keeping(is_function=True).eval(),
        "shifted-function": ShiftedKeeping(is_function=True).eval(),
    }


@pytest.fixture(scope="module")
def client() -> Iterator[trocar.Client]:
    hosted = {name: {"module": module, "input_shape": (4,)} for name, module in models().items()}
    with trocar.connect("local", models=hosted, settings={"device": "cpu"}) as connected:
        yield connected


def test_a_model_that_derives_in_its_forward_is_served(client: trocar.Client) -> None:
    model = Forces().eval()
    expected = model(torch.from_numpy(ROWS))
    for _ in range(2):
        found = client.extract("forces", ROWS, ['/out["forces"]', '/out["energy"]', "fc"])
        assert np.allclose(found['/out["forces"]'], expected["forces"].numpy(), atol=1e-6)
        assert np.allclose(found['/out["energy"]'], expected["energy"].detach().numpy(), atol=1e-6)
        assert np.allclose(found["fc"], model.fc(torch.from_numpy(ROWS)).detach().numpy(), atol=1e-6)


def loaded_anew(client: trocar.Client, name: str) -> None:
    """Let the next pass be the first: it runs in inference mode, whatever ran before."""
    client.unload(name)
    client.load(name)


@pytest.mark.parametrize("name", ["shifted", "chooses"])
def test_a_pass_that_is_repeated_gets_the_inputs_as_they_were_sent(client: trocar.Client, name: str) -> None:
    loaded_anew(client, name)
    for _ in range(2):
        assert np.allclose(client.extract(name, ROWS, "/out")["/out"], 3 * (ROWS - 1) ** 2, atol=1e-6)


def test_a_partial_pass_that_is_repeated_gets_the_value_as_it_was_sent(client: trocar.Client) -> None:
    loaded_anew(client, "shifted")
    for _ in range(2):
        found = client.extract("shifted", ROWS, "/out", start_at="first")
        assert np.allclose(found["/out"], 3 * (ROWS - 1) ** 2, atol=1e-6)


def test_a_first_pass_can_start_behind_a_part_that_derives(client: trocar.Client) -> None:
    loaded_anew(client, "shifted")
    found = client.extract("shifted", ROWS, "/out", start_at="last")
    assert np.array_equal(found["/out"], ROWS)


def test_a_trainer_steps_after_an_extract_has_filled_a_function_cache(client: trocar.Client) -> None:
    loaded_anew(client, "function")
    table_of.cache_clear()
    client.extract("function", ROWS, "/out")
    targets = np.zeros((2, 4), np.float32)
    with client.train("function", losses="mse", trainable=["fc"]) as trainer:
        loss = trainer.step(ROWS, targets).loss
    expected = nn.functional.mse_loss(models()["function"](torch.from_numpy(ROWS)), torch.from_numpy(targets))
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)


def test_a_step_whose_batch_was_overwritten_is_not_repeated_on_it(client: trocar.Client) -> None:
    """The failed step has cleared the cache: the same step, sent again, succeeds."""
    name, targets = "shifted-function", np.zeros((2, 4), np.float32)
    loaded_anew(client, name)
    table_of.cache_clear()
    client.extract(name, ROWS, "/out")
    with client.train(name, losses="mse", trainable=["fc"]) as trainer:
        with pytest.raises(trocar.errors.InputRejectedError, match="Inference tensors"):
            trainer.step(ROWS, targets)
        loss = trainer.step(ROWS, targets).loss
    output = models()[name](torch.from_numpy(ROWS.copy()))
    expected = nn.functional.mse_loss(output, torch.from_numpy(targets))
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)


@pytest.mark.parametrize("name", ["object", "function"])
def test_gradients_after_an_extract_of_a_model_that_keeps_a_tensor(client: trocar.Client, name: str) -> None:
    weight = models()[name].fc.weight.detach().numpy()
    expected = np.tile(np.cos(np.arange(4.0, dtype=np.float32)) @ weight, (2, 1))
    table_of.cache_clear()
    for _ in range(2):
        client.extract(name, ROWS, "/out")
        found = client.gradients(name, ROWS, of=trocar.value("/out"), at="/in")
        assert np.allclose(found["/in"], expected, atol=1e-6)
