"""Values that are the same for all samples: no row of them is a sample."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.support.servers.running_server import running_server

HEADS, STEPS, WIDTH = 2, 3, 8


class Bias(nn.Module):
    """A bias for each pair of positions, (heads, queries, keys)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * STEPS, HEADS)

    def forward(self, count: int) -> Any:
        places = torch.arange(count, device=self.table.weight.device)
        return self.table(places[:, None] - places[None] + count).permute(2, 0, 1)


class Biased(nn.Module):
    """Attention with a bias, for as many samples as it has heads in the test."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = Bias()
        self.folded = nn.Identity()
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> Any:
        batch, count, width = x.shape
        heads = x.view(batch, count, HEADS, width // HEADS).transpose(1, 2)
        scores = (heads @ heads.mT + self.bias(count)).softmax(-1)
        mixed = (scores @ heads).transpose(1, 2).reshape(batch, count, width)
        return self.out(mixed + self.folded(heads.reshape(batch * HEADS, count, -1)).sum())


def build() -> nn.Module:
    torch.manual_seed(0)
    return Biased().eval()


@pytest.fixture(scope="module")
def client() -> Iterator[trocar.Client]:
    models = {"biased": {"factory": f"{__name__}:build", "input_shape": (STEPS, WIDTH)}}
    with (
        running_server(models=models, device="cpu") as running,
        trocar.connect(running.address) as connected,
    ):
        yield connected


X = np.random.default_rng(0).standard_normal((HEADS, STEPS, WIDTH)).astype(np.float32)


def test_statistics_of_samples_are_refused_with_what_the_dimensions_are(client: trocar.Client) -> None:
    with pytest.raises(
        trocar.errors.ReductionRejectedError, match="no dimension of the value has samples: it is"
    ) as one:
        client.extract("biased", X, [trocar.tap("bias", stats="mean", over="sample")])
    assert "over='all'" in str(one.value)
    whole = client.extract("biased", X, [trocar.tap("bias", stats="mean", over="all")])
    assert whole.stats["bias"].mean == pytest.approx(whole["bias"].mean(), rel=1e-6)


@pytest.mark.parametrize("reduction", [trocar.pool("avg"), trocar.gram(), trocar.samples([1])])
def test_reductions_of_samples_are_refused(client: trocar.Client, reduction: Any) -> None:
    with pytest.raises(trocar.errors.ReductionRejectedError, match="no dimension holds samples"):
        client.extract("biased", X, [trocar.tap("bias", reduce=reduction)])


def test_edits_of_samples_are_refused(client: trocar.Client) -> None:
    with pytest.raises(trocar.TrocarError, match="sample"):
        client.extract("biased", X, ["bias"], edits=[trocar.edit("bias", "zero", samples=[1])])
    maps = client.extract("biased", X, ["bias"], edits=[trocar.edit("bias", "zero", index=np.s_[1])])
    assert not maps["bias"][1].any()
    assert maps["bias"][0].any()


def test_samples_that_are_folded_with_heads_are_rows_as_before(client: trocar.Client) -> None:
    maps = client.extract("biased", X, [trocar.tap("folded", stats="mean", over="sample")])
    assert "batch" in maps.info["folded"].axes[0]
    np.testing.assert_allclose(maps.stats["folded"].mean, maps["folded"].mean((1, 2)), rtol=1e-5)
