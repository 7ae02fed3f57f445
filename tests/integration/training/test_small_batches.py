"""Models that need two samples, in eval mode or with batch norms in train mode, against plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom, rebuilt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers.running_server import RunningServer

ROWS = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
LABELS = np.array([0, 1, 2, 0, 1])


class Normed(nn.Module):
    """A batch norm over single values."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.norm(self.fc(x)))
        return scores


class Spread(nn.Module):
    """Scores relative to those of the batch, which refuses one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(x)
        return scores / scores.std(0) if len(x) > 1 else self.refused()

    def refused(self) -> torch.Tensor:
        raise ValueError("give two samples")


class SpreadOnData(Spread):
    """The same, which reads its data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if (x > -100).all().item() else -x)


SPREAD: dict[str, dict[str, Any]] = {
    "spread": custom(Spread, (4,)),
    "on-data": custom(SpreadOnData, (4,)),
    "said": custom(Spread, inputs={"x": {"shape": ["batch", 4], "sizes": {"batch": 2}}}),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = {"normed": custom(Normed, (4,)), **SPREAD}
    with running_server(models=models, device="cpu", data_dir=tmp_path_factory.mktemp("data")) as running:
        yield running


def trainer(client: trocar.Client, model_id: str, **options: Any) -> trocar.training.Trainer:
    return client.train(model_id, losses="cross_entropy", optimizer=trocar.training.sgd(lr=0.1), **options)


@pytest.mark.parametrize("model_id", SPREAD)
def test_a_model_that_needs_two_samples_is_hosted(client: trocar.Client, model_id: str) -> None:
    expected = rebuilt(Spread)(torch.from_numpy(ROWS)).detach().numpy()
    assert np.allclose(client.extract(model_id, {"x": ROWS}, ["/out"])["/out"], expected, rtol=1e-6)
    assert client.plan(model_id, None, ["head"]).feature_maps["head"].shape == (2, 3)
    with pytest.raises(trocar.errors.InputRejectedError, match="give two samples"):
        client.extract(model_id, {"x": ROWS[:1]}, ["/out"])


def test_a_last_batch_of_one_is_refused_before_a_fit(client: trocar.Client) -> None:
    with trainer(client, "normed") as normed:
        before = normed.predict(ROWS)
        with pytest.raises(
            trocar.errors.FitInvalidError, match=r"the last batch of an epoch has one .*`drop_last`"
        ):
            normed.fit((ROWS, LABELS), epochs=1, batch_size=2)
        with pytest.raises(trocar.errors.FitInvalidError, match=r"batch_size: .* batches of one sample"):
            normed.fit((ROWS, LABELS), epochs=1, batch_size=1)
        assert normed.info().update_count == 0
        assert np.array_equal(normed.predict(ROWS), before)
        history = normed.fit((ROWS, LABELS), epochs=2, batch_size=2, drop_last=True, eval=(ROWS, LABELS))
        assert len(history.losses) == 4


def test_frozen_batch_norms_take_a_last_batch_of_one(client: trocar.Client) -> None:
    with trainer(client, "normed", trainable=["head"]) as frozen:
        assert len(frozen.fit((ROWS, LABELS), epochs=1, batch_size=2).losses) == 3


def test_an_evaluation_has_no_batch_of_one_where_the_model_refuses_it(client: trocar.Client) -> None:
    data, four = (ROWS, LABELS), (ROWS[:4], LABELS[:4])
    with trainer(client, "spread") as spread:
        with pytest.raises(
            trocar.errors.FitInvalidError, match="eval_dataset_id: the last batch has one sample"
        ):
            spread.fit(four, epochs=1, batch_size=2, eval=data)
        assert len(spread.fit(four, epochs=1, batch_size=2, eval=four).losses) == 2
