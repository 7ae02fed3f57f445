"""Models that write to their own input: every pass of a request begins with what the caller sent."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.support.oracles.oracle import Array
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom


class Shifts(nn.Module):
    """Writes to its input; traceable, and without a need for data."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.sub_(1.0)
        result: torch.Tensor = self.block(x) + 1.0
        return result


class ShiftsByData(nn.Module):
    """Writes to its input, and calls its block twice for a large negative sum."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Identity()
        self.after = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.sub_(1.0)
        y = self.block(x)
        if x.sum().item() < -100:
            y = self.block(x)
        result: torch.Tensor = self.after(y) + 1.0
        return result


@pytest.fixture(scope="module")
def client() -> Iterator[trocar.Client]:
    models = {"shifts": custom(Shifts), "by-data": custom(ShiftsByData)}
    with running_server(models=models, device="cpu") as server, trocar.connect(server.address) as connected:
        yield connected


def rows(value: float) -> Array:
    return np.full((2, 3), value, np.float32)


def test_modules_and_nodes_of_one_request_begin_with_the_same_input(client: trocar.Client) -> None:
    found = client.extract("shifts", rows(0.0), ["block", "fx:block"])
    assert np.array_equal(found["block"], rows(-1.0))
    assert np.array_equal(found["fx:block"], rows(-1.0))


@pytest.mark.parametrize("taps", [["block@-1"], ["block@-1", "fn:sub_@-1"]])
@pytest.mark.parametrize("value", [0.0, -50.0])  # as recorded, and another number of calls
def test_a_pass_that_is_run_again_begins_with_the_input(
    client: trocar.Client, taps: list[str], value: float
) -> None:
    given = rows(value)
    found = client.extract("by-data", given, taps)
    assert all(np.array_equal(array, rows(value - 1.0)) for array in found.values())
    assert np.array_equal(given, rows(value))


@pytest.mark.parametrize("value", [0.0, -50.0])
def test_a_source_that_is_run_again_begins_with_its_input(client: trocar.Client, value: float) -> None:
    edit = trocar.edit("after", "swap", source="other", at="block@-1")
    found = client.extract("by-data", rows(0.0), "after", edits=edit, sources={"other": rows(value)})
    assert np.array_equal(found["after"], rows(value - 1.0))
