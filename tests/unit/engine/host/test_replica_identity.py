"""What is compared between replicas: weights bit by bit, computed buffers but for roundings."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.deployments import hosted
from trocar_server.cluster.members import difference_of
from trocar_server.engine.host.deployment import make_deployment
from trocar_server.engine.host.deployment_identity import deployment_identity
from trocar_server.engine.host.replica_identity import replica_identity
from trocar_server.engine.schedule.device import DeviceThread

SHAPE = (4,)


class Net(nn.Module):
    """A layer with fixed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(4))
            self.fc.bias.fill_(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))


async def identity_of(owner: DeviceThread, *, is_saved: bool = False, **buffers: Tensor) -> dict[str, Any]:
    made = hosted(Net, SHAPE)
    for name, buffer in buffers.items():
        made.module.register_buffer(name, buffer, persistent=is_saved)
    replica = make_deployment(made, 1, 4)
    found = await replica_identity(replica, await deployment_identity(replica, [], owner, {}), owner)
    assert json.loads(json.dumps(found)) == found
    return found


async def differ(owner: DeviceThread, first: Tensor, second: Tensor, *, is_saved: bool = False) -> bool:
    both = [await identity_of(owner, is_saved=is_saved, table=each) for each in (first, second)]
    assert difference_of(both[0], both[1]) == difference_of(both[1], both[0])
    return bool(difference_of(*both))


def drawn(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


async def test_equal_weights_agree_and_one_other_bit_differs(owner: DeviceThread) -> None:
    weights = drawn(8, 0)
    assert not await differ(owner, weights, weights.clone(), is_saved=True)
    other = weights.clone()
    other[3] = torch.nextafter(other[3], torch.tensor(9.0))
    assert await differ(owner, weights, other, is_saved=True)


@pytest.mark.parametrize("count", [1, 8, 3_000_000])
async def test_a_drawn_buffer_differs_however_large_it_is(owner: DeviceThread, count: int) -> None:
    assert await differ(owner, drawn(count, 0), drawn(count, 1))


async def test_an_order_differs(owner: DeviceThread) -> None:
    assert await differ(owner, torch.arange(1000), torch.arange(1000).flip(0))


@pytest.mark.parametrize("count", [8, 3_000_000])
async def test_roundings_of_another_processor_do_not_differ(owner: DeviceThread, count: int) -> None:
    angles = 1.0 / 10_000 ** (torch.arange(count) / count)
    assert not await differ(owner, angles, torch.nextafter(angles, torch.tensor(2.0)))


@pytest.mark.parametrize(
    "table",
    [
        torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0]),
        torch.full((3, 3), torch.finfo(torch.float32).min).triu(1),
        torch.randn(3, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.empty(0),
        torch.tensor(2.0),
    ],
    ids=["infinite", "mask", "complex", "bool", "empty", "scalar"],
)
async def test_every_kind_of_table_agrees_with_itself(owner: DeviceThread, table: Tensor) -> None:
    assert not await differ(owner, table, table.clone())


async def test_weights_that_cannot_be_hashed_are_compared_by_sketches(owner: DeviceThread) -> None:
    def sparse(*values: float) -> Tensor:
        return torch.eye(4)[0].mul(values[0]).add(torch.eye(4)[1] * values[1]).to_sparse()

    first, same, other = [
        await identity_of(owner, is_saved=True, graph=graph)
        for graph in (sparse(1.0, 2.0), sparse(1.0, 2.0), sparse(1.0, 3.0))
    ]
    assert "weights" not in first["parts"]
    assert first["buffers"].keys() == {"fc.weight", "fc.bias", "graph"}
    assert difference_of(first, same) == ""
    assert "graph" in difference_of(first, other)
