import math

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trocar import FeatureMapInfo, FeatureMaps, ServerTiming, Statistics
from trocar._cli.merging import Number, StatisticsTable, wanted_statistics
from trocar._taps import STATISTICS
from trocar._tensors import Array

SINGLE = ("skewness", "kurtosis", "quantiles", "histogram", "covariance", "argmax_channel")
ALL = tuple(name for name in STATISTICS if name not in SINGLE)


def numpy_statistics(values: Array, axes: tuple[int, ...] | None) -> dict[str, Array]:
    """NumPy's own answers, in float64."""
    with np.errstate(all="ignore"):
        return {
            "mean": values.mean(axes),
            "var": values.var(axes),
            "std": values.std(axes),
            "min": values.min(axes),
            "max": values.max(axes),
            "absmax": np.abs(values).max(axes),
            "l2": np.sqrt((values * values).sum(axes)),
            "zero_fraction": (values == 0).mean(axes),
            "nan_count": np.isnan(values).sum(axes),
            "inf_count": np.isinf(values).sum(axes),
            "l1": np.abs(values).sum(axes),
            "count": np.isfinite(values).sum(axes) + (~np.isfinite(values)).sum(axes),
        }


def batch_maps(values: Array, over: str, names: tuple[str, ...]) -> FeatureMaps:
    """One feature map `x` with the statistics of a batch, as a reply has it."""
    axes = {"all": None, "channel": (0, 2), "sample": (1, 2)}[over]
    numbers = numpy_statistics(values, axes)
    chosen = {name: numbers[name] if axes else numbers[name].item() for name in names}
    info = FeatureMapInfo("x", "x", "Linear", 0, "out", "", values.shape, "float64", False)
    statistics = Statistics(chosen, over=over, channel_dim=1 if over == "channel" else None)
    return FeatureMaps(
        {}, info={"x": info}, stats={"x": statistics}, expansions={"x": ("x",)}, timing=ServerTiming(0, 0)
    )


def merged(batches: list[Array], over: str, names: tuple[str, ...]) -> dict[str, Number]:
    table = StatisticsTable(names)
    for values in batches:
        table.add(batch_maps(values, over, wanted_statistics(names)))
    return table.values()["x"]


def arrays(elements: st.SearchStrategy[float]) -> st.SearchStrategy[list[Array]]:
    shapes = st.tuples(st.integers(1, 4), st.just(3), st.just(2))
    array = shapes.flatmap(lambda shape: hnp.arrays(np.float64, shape, elements=elements))
    return st.lists(array, min_size=1, max_size=4)


@pytest.mark.parametrize("over", ["all", "channel", "sample"])
@given(batches=arrays(st.floats(-1e3, 1e3)))
def test_batches_give_what_numpy_gives_for_all_samples_at_once(over: str, batches: list[Array]) -> None:
    axes = {"all": None, "channel": (0, 2), "sample": (1, 2)}[over]
    expected = numpy_statistics(np.concatenate(batches), axes)
    found = merged(batches, over, ALL)
    for name in ALL:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-6, err_msg=name)


@given(batches=arrays(st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf])))
def test_nan_and_infinity_propagate_as_in_numpy(batches: list[Array]) -> None:
    names = ("mean", "min", "max", "absmax", "nan_count", "inf_count", "zero_fraction")
    expected = numpy_statistics(np.concatenate(batches), None)
    found = merged(batches, "all", names)
    for name in names:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, err_msg=name)


def test_only_the_named_statistics_come_out() -> None:
    assert list(merged([np.ones((2, 3, 2))] * 2, "all", ("std",))) == ["std"]


def test_counts_are_whole_numbers() -> None:
    assert merged([np.full((2, 3, 2), np.nan)] * 2, "all", ("nan_count",)) == {"nan_count": 24}


def test_shape_counts_the_samples_of_all_batches() -> None:
    table = StatisticsTable(("mean",))
    for size in (4, 4, 1):
        table.add(batch_maps(np.ones((size, 3, 2)), "all", ("mean",)))
    assert table.shapes == {"x": (9, 3, 2)}


def test_what_cannot_be_merged_is_refused_with_several_batches() -> None:
    table = StatisticsTable(("kurtosis",))
    info = FeatureMapInfo("x", "x", "Linear", 0, "out", "", (2, 3), "float64", False)
    maps = FeatureMaps(
        {},
        info={"x": info},
        stats={"x": Statistics({"kurtosis": 1.5})},
        expansions={"x": ("x",)},
        timing=ServerTiming(0, 0),
    )
    table.add(maps)
    assert table.values() == {"x": {"kurtosis": 1.5}}
    with pytest.raises(typer.BadParameter, match="kurtosis of several batches"):
        table.add(maps)
