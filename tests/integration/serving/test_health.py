"""The health report of a real server against torch's own backward pass."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.nn import functional as F

import trocar


class Odd(nn.Module):
    """Parameters of its own, a module that is never called, one called twice, and one that is not needed."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(4))
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.plain_norm = nn.BatchNorm2d(4, affine=False)
        self.relu = nn.ReLU(inplace=True)
        self.shared = nn.Linear(4, 4)
        self.hidden = nn.Linear(4, 4)
        self.aside = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 2)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.plain_norm(self.norm(self.conv(x)))).mean((2, 3)) + self.token
        x = self.relu(self.shared(self.shared(x)))
        self.aside(x)
        result: torch.Tensor = self.fc(F.linear(x, self.hidden.weight))
        return result


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    return Odd().eval()


@pytest.fixture(scope="module")
def client(module: nn.Module) -> Iterator[trocar.Client]:
    buffers = nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.Flatten()).eval()
    models = {
        "odd": {"module": module, "input_shape": (3, 8, 8)},
        "buffers": {"module": buffers, "input_shape": (3, 4, 4)},
    }
    with capture_logs(), trocar.connect("local", models=models) as connected:
        yield connected


@pytest.fixture(scope="module")
def inputs() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal((3, 3, 8, 8)).astype(np.float32)


LABELS = [4, 0, 2]


def torch_norms(module: nn.Module, inputs: object) -> dict[str, tuple[float, float]]:
    """The norm of the gradients of each module's own parameters, and of these, from torch alone."""
    module.zero_grad()
    F.cross_entropy(module(torch.as_tensor(inputs)), torch.tensor(LABELS)).backward()
    found = {}
    for path, inner in module.named_modules():
        own = [p for p in inner.parameters(recurse=False) if p.grad is not None]
        if own:
            gradients = torch.cat([p.grad.double().ravel() for p in own if p.grad is not None])
            values = torch.cat([p.detach().double().ravel() for p in own])
            found[path] = (float(gradients.norm()), float(values.norm()))
    module.zero_grad()
    return found


def test_norms_of_parameters_are_those_of_torch(
    client: trocar.Client, module: nn.Module, inputs: object
) -> None:
    health = client.health("odd", np.asarray(inputs), of=trocar.loss("cross_entropy", LABELS))
    expected = torch_norms(module, inputs)
    found = {row.path: row for row in health.rows if row.parameter_gradient_norm is not None}
    assert found.keys() == expected.keys()
    for path, (gradient, weights) in expected.items():
        assert found[path].parameter_gradient_norm == pytest.approx(gradient, rel=1e-5)
        assert found[path].weight_norm == pytest.approx(weights, rel=1e-12)


def test_rows_are_calls_in_execution_order(client: trocar.Client, inputs: object) -> None:
    health = client.health("odd", np.asarray(inputs), of=trocar.loss("cross_entropy", LABELS))
    assert [row.name for row in health.rows] == [
        "conv",
        "norm",
        "plain_norm",
        "relu@0",
        "shared@0",
        "shared@1",
        "relu@1",
        "fc",
        "hidden/param(*)",
        "/param(*)",
    ]


def test_norms_at_outputs_are_those_of_the_gradients(client: trocar.Client, inputs: object) -> None:
    of, at = trocar.loss("cross_entropy", LABELS), ["fc", "relu@1", "conv", "/in"]
    health = client.health("odd", np.asarray(inputs), of=of, at=at)
    gradients = client.gradients("odd", np.asarray(inputs), of=of, at=at)
    names = {"/in": "/grad_in", **{path: f"{path}/grad_out" for path in at[:-1]}}
    assert [row.name for row in health.rows] == ["/in", "conv", "relu@1", "fc"]
    for row in health.rows:
        values = gradients[names[row.name]].astype(np.float64)
        assert row.gradient_norm == pytest.approx(float(np.linalg.norm(values)), rel=1e-12)
        assert row.zero_fraction == pytest.approx(float((values == 0).mean()), abs=1e-12)
    assert health.objective == gradients.objective


def test_an_edit_shows_in_the_report(client: trocar.Client, inputs: object) -> None:
    edit = trocar.edit("relu@1/grad_out", "zero")
    of = trocar.loss("cross_entropy", LABELS)
    health = client.health("odd", np.asarray(inputs), of=of, edits=[edit])
    dead = {row.name for row in health.rows if "dead" in row.flags}
    assert {"conv", "norm", "relu@0", "shared@0", "shared@1", "/param(*)"} <= dead
    assert not dead & {"fc", "hidden/param(*)"}


def test_nan_is_flagged_where_it_is(client: trocar.Client, inputs: object) -> None:
    poisoned = np.array(inputs)
    poisoned[0, 0, 0, 0] = np.nan
    health = client.health("odd", poisoned, of=trocar.value("conv"))
    assert [(row.name, row.flags) for row in health.rows] == [("conv", ("nan",))]
    assert health["conv"].nan_count > 0


def test_a_model_with_buffers_alone_has_a_report(client: trocar.Client) -> None:
    health = client.health("buffers", np.ones((2, 3, 4, 4), np.float32), of=trocar.value("/out"))
    assert [(row.name, row.weight_norm) for row in health.rows] == [("0", None), ("1", None)]
