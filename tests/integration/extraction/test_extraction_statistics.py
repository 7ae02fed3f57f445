"""Statistics through a real server against NumPy in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.oracles.oracle import Array, noise
from trocar_server.tensors.stats import Statistic


def standard_moment(values: Array, axis: Any, order: int) -> Any:
    """As SciPy's `skew` and `kurtosis`, whose warnings about NaN and Inf are not wanted here."""
    deviation = values - values.mean(axis, keepdims=True)
    return (deviation**order).mean(axis) / (deviation**2).mean(axis) ** (order / 2)


NUMPY: dict[str, Callable[[Array, Any], Any]] = {
    "mean": lambda values, axis: values.mean(axis),
    "var": lambda values, axis: values.var(axis),
    "std": lambda values, axis: values.std(axis),
    "min": lambda values, axis: values.min(axis),
    "max": lambda values, axis: values.max(axis),
    "absmax": lambda values, axis: np.abs(values).max(axis),
    "l2": lambda values, axis: np.sqrt((values**2).sum(axis)),
    "zero_fraction": lambda values, axis: (values == 0).mean(axis),
    "nan_count": lambda values, axis: np.isnan(values).sum(axis),
    "inf_count": lambda values, axis: np.isinf(values).sum(axis),
    "l1": lambda values, axis: np.abs(values).sum(axis),
    "skewness": lambda values, axis: standard_moment(values, axis, 3),
    "kurtosis": lambda values, axis: standard_moment(values, axis, 4) - 3,
    "count": lambda values, axis: np.ones(values.shape).sum(axis),
}
ALL: Any = list(NUMPY)
MORE = {"quantiles", "histogram", "covariance", "argmax_channel"}
IMAGES = noise(3, 3, 8, 8, seed=1)
FINITE = np.maximum(noise(3, 4, 5, 6, seed=2) * 1000 - 300, 0)
AXES = {"all": None, "channel": (0, 2, 3), "sample": (1, 2, 3)}


def compared(found: trocar.Statistics, values: Array, axis: Any) -> None:
    for name, formula in NUMPY.items():
        wanted = formula(values.astype(np.float64), axis)
        np.testing.assert_allclose(getattr(found, name), wanted, rtol=1e-12, atol=1e-12, err_msg=name)


def test_the_oracle_knows_every_statistic() -> None:
    assert {*NUMPY, *MORE} == set(Statistic)


@pytest.mark.parametrize("over", AXES)
def test_statistics_are_those_of_numpy(client: trocar.Client, over: Any) -> None:
    maps = client.extract("identity", FINITE, taps=trocar.tap("identity", stats=ALL, over=over))
    compared(maps.stats["identity"], FINITE, AXES[over])


@pytest.mark.parametrize("over", AXES)
def test_statistics_of_a_feature_map_are_those_of_its_values(client: trocar.Client, over: Any) -> None:
    maps = client.extract("plain", IMAGES, taps=trocar.tap("conv", stats=ALL, over=over))
    compared(maps.stats["conv"], maps["conv"], AXES[over])


@pytest.mark.parametrize(("dim", "axis"), [(0, (1, 2, 3)), (-1, (0, 1, 2)), (2, (0, 1, 3))])
def test_the_channel_dimension_can_be_chosen(client: trocar.Client, dim: int, axis: tuple[int, ...]) -> None:
    wanted = trocar.tap("identity", stats=ALL, over="channel", channel_dim=dim)
    found = client.extract("identity", FINITE, taps=wanted).stats["identity"]
    compared(found, FINITE, axis)
    assert found.channel_dim == dim % 4


@pytest.mark.parametrize(("shape", "axis"), [((2, 5, 7), (0, 1)), ((4, 6), (0,))])
def test_channels_are_where_they_usually_are(
    client: trocar.Client, shape: tuple[int, ...], axis: tuple[int, ...]
) -> None:
    values = noise(*shape)
    found = client.extract("identity", values, taps=trocar.tap("identity", stats=ALL, over="channel"))
    compared(found.stats["identity"], values, axis)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("over", AXES)
def test_nan_and_infinity_propagate_as_in_numpy(client: trocar.Client, over: Any, bad: float) -> None:
    values = FINITE.copy()
    values[1, 2, 3, 4] = bad
    found = client.extract("identity", values, taps=trocar.tap("identity", stats=ALL, over=over))
    with np.errstate(invalid="ignore"):
        compared(found.stats["identity"], values, AXES[over])


@pytest.mark.parametrize("over", AXES)
def test_quantiles_and_histograms_are_those_of_numpy(client: trocar.Client, over: Any) -> None:
    wanted = trocar.tap("identity", stats=[trocar.quantiles(0.05, 0.5), trocar.histogram(bins=9)], over=over)
    found = client.extract("identity", FINITE, taps=wanted).stats["identity"]
    values, groups = FINITE.astype(np.float64), {"all": 1, "channel": 4, "sample": 3}[over]
    quantiles = np.moveaxis(np.quantile(values, (0.05, 0.5), axis=AXES[over]), 0, -1)
    np.testing.assert_array_equal(found.quantiles, quantiles)
    assert found.rank_error == 0.0
    rows = np.moveaxis(values, 1 if over == "channel" else 0, 0).reshape(groups, -1)
    counts = [np.histogram(row, found.histogram.edges)[0] for row in rows]
    np.testing.assert_array_equal(found.histogram.counts, counts[0] if over == "all" else counts)
    assert found.histogram.counts.sum() == FINITE.size


def test_a_histogram_has_the_edges_that_are_given(client: trocar.Client) -> None:
    edges = [0.0, 1.0, 10.5, 100.0]
    wanted = trocar.tap("identity", stats=trocar.histogram(edges=edges))
    found = client.extract("identity", FINITE, taps=wanted).stats["identity"].histogram
    np.testing.assert_array_equal(found.edges, edges)
    np.testing.assert_array_equal(found.counts, np.histogram(FINITE, edges)[0])


@pytest.mark.parametrize(("over", "axis"), [("all", (0, 2, 3)), ("sample", (2, 3))])
def test_the_strongest_channel_is_found(client: trocar.Client, over: Any, axis: tuple[int, ...]) -> None:
    wanted = trocar.tap("identity", stats=["argmax_channel"], over=over)
    found = client.extract("identity", FINITE, taps=wanted).stats["identity"]
    np.testing.assert_array_equal(found.argmax_channel, np.argmax(FINITE.max(axis), axis=-1))


@pytest.mark.parametrize("over", ["all", "sample"])
def test_a_value_without_channels_has_no_strongest_one(client: trocar.Client, over: Any) -> None:
    wanted = trocar.tap("identity", stats=["argmax_channel"], over=over)
    with pytest.raises(trocar.errors.InvalidArgumentError, match="at least 2 dimensions"):
        client.extract("identity", noise(3), taps=wanted)


def test_values_stay_away_when_only_statistics_are_wanted(client: trocar.Client) -> None:
    maps = client.extract("plain", IMAGES, taps=trocar.tap("conv", stats=["mean"], values=False))
    assert list(maps) == []
    assert maps.info["conv"].shape == (3, 4, 8, 8)
    assert isinstance(maps.stats["conv"].mean, float)


def test_values_and_statistics_may_be_mixed_among_taps(client: trocar.Client) -> None:
    taps: list[str | trocar.Tap] = [
        "pool",
        trocar.tap("conv", stats=["max"], values=False),
        trocar.tap("fc", stats=["min"]),
    ]
    maps = client.extract("plain", IMAGES, taps=taps)
    assert list(maps) == ["pool", "fc"]
    assert list(maps.stats) == ["conv", "fc"]
    assert maps.stats["fc"].min == maps["fc"].min()


def test_statistics_of_integers_and_truths_are_computed(client: trocar.Client) -> None:
    values = np.array([[0, 3, -5], [7, 0, 1]], np.int32)
    found = client.extract("identity", values, taps=trocar.tap("identity", stats=ALL)).stats["identity"]
    compared(found, values, None)


def test_statistics_of_bfloat16_are_those_of_its_exact_values(client: trocar.Client) -> None:
    maps = client.extract("half", noise(3, 7) * 50, taps=trocar.tap("/out", stats=ALL))
    compared(maps.stats["/out"], maps["/out"], None)


def test_statistics_of_complex_numbers_are_refused(client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.InvalidArgumentError, match="complex"):
        client.extract("identity", np.ones((1, 2), np.complex64), taps=trocar.tap("identity", stats=["mean"]))


def test_statistics_of_a_value_that_a_later_module_overwrites_are_those_before(client: trocar.Client) -> None:
    taps: list[str | trocar.Tap] = [trocar.tap("conv", stats=["min"], values=False), "fc"]
    found = client.extract("plain", IMAGES, taps=taps).stats["conv"].min
    assert found == client.extract("plain", IMAGES, taps="conv")["conv"].min() < 0


def test_statistics_over_a_million_channels_arrive_or_are_refused_by_the_server(
    client: trocar.Client,
) -> None:
    """Ten of them are 80 MB in the reply's first message; no client takes that."""
    values = np.zeros((1, 1, 1_000_000), np.float32)
    wanted = trocar.tap("identity", stats=ALL, over="channel", channel_dim=-1, values=False)
    try:
        found = client.extract("identity", values, taps=wanted).stats["identity"]
    except trocar.errors.ReplyTooLargeError as error:
        assert "byte_count" in error.details  # noqa: PT017 - either answer is right
    else:
        assert np.shape(found.mean) == (1_000_000,)
