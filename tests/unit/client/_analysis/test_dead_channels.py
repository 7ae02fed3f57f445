from pathlib import Path

import numpy as np
import pytest
import torch

import trocar
from tests.unit.client._analysis.conftest import Analyse
from tests.unit.client._analysis.fake_client import FakeModels
from trocar._analysis.dead_channels import dead_channels_of
from trocar._base.tensors import Array
from trocar_server.tensors.stats.accumulator import reduce
from trocar_server.tensors.stats.statistic import Scope, Statistic


def convolution(batch: Array) -> Array:
    """Four channels: alive, dead, tiny, alive in the third sample of all only."""
    return np.stack([batch[:, 0], batch[:, 0] * 0, batch[:, 1] * 1e-6, batch[:, 2]], axis=1)


def tokens(batch: Array) -> Array:
    """(batch, tokens, width): the last of three is dead, the second holds a NaN once."""
    values = np.stack([batch[:, 0, 0], batch[:, 1, 0], batch[:, 1, 0] * 0], axis=2)
    return np.where(batch[:, :1, 0, :1] > 90, values * [1, np.nan, 1], values)


MODELS = {
    "m": {
        "conv": convolution,
        "tokens": tokens,
        "fc": lambda x: x[:, :, 0, 0],
        "loss": lambda x: x[:, 0, 0, 0],
    }
}


def images() -> Array:
    x = np.random.default_rng(0).standard_normal((8, 3, 4, 4))
    x[:, 2] = 0
    x[2, 2, 1, 1] = -3.0
    return x


def test_dead_channels_are_those_whose_maximum_numpy_finds_to_be_zero(analyse: Analyse) -> None:
    x = images()
    report = analyse(FakeModels(MODELS), "dead_channels", "m", x, batch_size=3)
    assert [row.name for row in report.rows] == ["conv", "tokens", "fc"]
    for row, values in zip(
        report.rows, (convolution(x), np.moveaxis(tokens(x), 2, 1), x[:, :, 0, 0]), strict=True
    ):
        dead = np.abs(values.reshape(len(x), values.shape[1], -1)).max(axis=(0, 2)) == 0
        assert row.dead == tuple(np.flatnonzero(dead))
        assert row.channels == values.shape[1]
    assert report["conv"].dead == (1,)
    assert (report.dead_count, report.channel_count, report.nan_count) == (3, 10, 0)


def test_a_channel_that_lives_in_one_sample_of_one_batch_is_alive(analyse: Analyse) -> None:
    report = analyse(FakeModels(MODELS), "dead_channels", "m", images(), "conv", batch_size=1)
    assert 3 not in report["conv"].dead
    report = analyse(FakeModels(MODELS), "dead_channels", "m", images()[3:], "conv", batch_size=1)
    assert 3 in report["conv"].dead


def test_the_threshold_is_the_largest_value_of_a_dead_channel(analyse: Analyse) -> None:
    limit = float(np.abs(convolution(images())[:, 2]).max())
    at = analyse(FakeModels(MODELS), "dead_channels", "m", images(), "conv", threshold=limit)
    below = analyse(FakeModels(MODELS), "dead_channels", "m", images(), "conv", threshold=limit * 0.999)
    assert (at["conv"].dead, below["conv"].dead) == ((1, 2), (1,))


def test_channels_with_nan_are_reported_apart(analyse: Analyse) -> None:
    x = images()
    x[5, 0, 0, 0] = 99.0
    row = analyse(FakeModels(MODELS), "dead_channels", "m", x, "tokens")["tokens"]
    assert (row.dead, row.nan) == ((2,), (1,))


def test_channels_without_any_value_hold_no_nan() -> None:
    rows = torch.empty(0, 4)
    counted = reduce(rows, [Statistic.ABSMAX, Statistic.NAN_COUNT], Scope.CHANNEL).values
    named = {key.name.lower(): np.array(value) for key, value in counted.items()}
    assert np.isnan(named["absmax"]).all()  # of nothing
    about = trocar.FeatureMapInfo("x", "x", "Linear", 0, "out", "", (0, 4), "float32", False)
    report = dead_channels_of({"x": trocar.Statistics(named, over="channel")}, {"x": about}, 0.0, "m")
    assert (report["x"].dead, report["x"].nan, report["x"].channels) == ((), (), 4)


def test_an_infinite_channel_is_alive(analyse: Analyse) -> None:
    x = images()
    x[0, 0] = np.inf
    models = {"m": {"fc": lambda batch: batch[:, :, 0, 0]}}
    row = analyse(FakeModels(models), "dead_channels", "m", x)["fc"]
    assert (row.dead, row.nan) == ((2,), ())


def test_no_values_are_asked_for(analyse: Analyse) -> None:
    fake = FakeModels(MODELS)
    analyse(fake, "dead_channels", "m", images(), trocar.tap("conv", channel_dim=1, over="channel"))
    ((_, (tap,)),) = fake.streams
    assert (tap.values, tap.over, tap.channel_dim) == (False, "channel", 1)


@pytest.mark.parametrize("threshold", [-1.0, float("nan"), float("inf")])
def test_a_threshold_that_is_none_is_refused(analyse: Analyse, threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        analyse(FakeModels(MODELS), "dead_channels", "m", images(), threshold=threshold)


def test_no_inputs_are_refused(analyse: Analyse) -> None:
    with pytest.raises(ValueError, match="empty"):
        analyse(FakeModels(MODELS), "dead_channels", "m", [])
    with pytest.raises(ValueError, match="no batch"):
        analyse(FakeModels(MODELS), "dead_channels", "m", iter([]))


def test_an_empty_list_of_taps_is_refused(analyse: Analyse) -> None:
    with pytest.raises(ValueError, match="taps is empty"):
        analyse(FakeModels(MODELS), "dead_channels", "m", images(), [])


def test_the_report_prints_what_is_dead(analyse: Analyse) -> None:
    report = analyse(FakeModels(MODELS), "dead_channels", "m", images())
    assert [line.split() for line in str(report).splitlines()] == [
        ["feature", "map", "type", "channels", "dead", "share", "NaN", "dead", "channels"],
        ["conv", "Conv2d", "4", "1", "25.0%", "1"],
        ["tokens", "Conv2d", "3", "1", "33.3%", "2"],
        ["fc", "Conv2d", "3", "1", "33.3%", "2"],
        ["3", "of", "10", "channels", "of", "3", "feature", "maps", "are", "dead"],
    ]
    assert "<td>25.0%</td>" in report._repr_html_()


def test_many_dead_channels_are_cut_in_the_table_only(analyse: Analyse) -> None:
    models = {"m": {"wide": lambda x: np.zeros((len(x), 100))}}
    report = analyse(FakeModels(models), "dead_channels", "m", images())
    assert str(report).splitlines()[1].endswith("0, 1, 2, 3, 4, 5, 6, 7, ...")
    assert report["wide"].dead == tuple(range(100))


def test_unknown_names_show_the_nearest(analyse: Analyse) -> None:
    report = analyse(FakeModels(MODELS), "dead_channels", "m", images())
    with pytest.raises(KeyError, match="nearest: conv"):
        report["convv"]


def test_the_plot_is_a_picture(analyse: Analyse, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    x = images()
    x[5, 0, 0, 0] = 99.0
    figure = analyse(FakeModels(MODELS), "dead_channels", "m", x).plot(tmp_path / "dead.png")
    assert (tmp_path / "dead.png").read_bytes().startswith(b"\x89PNG")
    dead, nan = figure.axes[0].containers
    np.testing.assert_allclose([bar.get_width() for bar in dead], [25, 100 / 3, 100 / 3])
    np.testing.assert_allclose([bar.get_width() for bar in nan], [0, 100 / 3, 0])
