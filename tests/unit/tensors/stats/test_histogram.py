"""Histograms, against `numpy.histogram` with the same edges."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.unit.tensors.stats.oracle import Array, groups, tensor
from trocar_server.tensors.stats import Accumulator, Scope, Statistic, StatisticParameters, StatisticsResult

HISTOGRAM = [Statistic.HISTOGRAM]
ELEMENTS = (
    st.floats(width=64)
    | st.floats(-1e3, 1e3)
    | st.integers(-5, 5).map(float)
    | st.sampled_from([1e8, 1e8 + 1e-7, -1e8, 1.5, 0.1])
)
ARRAYS = hnp.arrays(np.float64, hnp.array_shapes(min_dims=2, max_dims=3, max_side=5), elements=ELEMENTS)


def histogram(pieces: list[Array], scope: Scope = Scope.ALL, **parameters: object) -> StatisticsResult:
    accumulator = Accumulator(HISTOGRAM, scope, 1, StatisticParameters(**parameters))  # type: ignore[arg-type]
    for piece in pieces:
        accumulator.update(tensor(piece))
    return accumulator.result()


def counts(result: StatisticsResult) -> Array:
    return np.array(result.values[Statistic.HISTOGRAM]).reshape(-1, len(result.edges) - 1)


def assert_numpy_counts_the_same(result: StatisticsResult, values: Array, scope: Scope) -> None:
    for found, part in zip(counts(result), groups(values, scope, 1), strict=True):
        wanted, _ = np.histogram(part[np.isfinite(part)], np.array(result.edges))
        np.testing.assert_array_equal(found, wanted)


@given(values=ARRAYS, scope=st.sampled_from(Scope), bin_count=st.integers(1, 9), data=st.data())
def test_automatic_bins_hold_every_finite_element_where_numpy_puts_it(
    values: Array, scope: Scope, bin_count: int, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(values)), max_size=3).map(sorted))
    result = histogram(np.split(values, cuts), scope, bin_count=bin_count)
    assert 2 <= len(result.edges) <= bin_count + 1
    assert_numpy_counts_the_same(result, values, scope)
    assert counts(result).sum() == np.isfinite(values).sum()


@given(values=ARRAYS, scope=st.sampled_from(Scope), bin_count=st.integers(1, 9), data=st.data())
def test_batches_have_the_bins_of_one_tensor(
    values: Array, scope: Scope, bin_count: int, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(values)), max_size=3).map(sorted))
    whole = histogram([values], scope, bin_count=bin_count)
    assert histogram(np.split(values, cuts), scope, bin_count=bin_count) == whole


@given(values=ARRAYS, bin_count=st.integers(2, 9))
def test_automatic_edges_are_neighbouring_multiples_of_a_power_of_two(values: Array, bin_count: int) -> None:
    edges = histogram([values], bin_count=bin_count).edges
    inner = [edge for edge in edges if abs(edge) < np.finfo(np.float64).max]
    widths = {right - left for left, right in pairwise(inner)}
    assert len(widths) <= 1
    for width in widths:
        assert math.frexp(width)[0] == 0.5
        assert all((edge / width).is_integer() for edge in inner)


@pytest.mark.parametrize(
    ("values", "bin_count", "edges"),
    [
        ([0.5, 3.9], 4, (0.0, 1.0, 2.0, 3.0, 4.0)),
        ([0.5, 4.0], 4, (0.0, 2.0, 4.0, 6.0)),
        ([-1.0, 1.0], 2, (-2.0, 0.0, 2.0)),
        ([-1.0, 1.0], 1, (-2.0, 2.0)),
        ([1.0, 1.0], 8, (1.0, 1.0 + 2**-52)),
        ([-1.7e308, 1.7e308], 2, (-np.finfo(float).max, 0.0, np.finfo(float).max)),
        ([-1e-300, 1.7e308], 2, (-np.finfo(float).max, 0.0, np.finfo(float).max)),
        ([np.nan, np.inf, -np.inf], 8, (0.0, 1.0)),
        ([], 8, (0.0, 1.0)),
    ],
)
def test_the_finest_bins_that_are_few_enough_are_chosen(
    values: list[float], bin_count: int, edges: tuple[float, ...]
) -> None:
    result = histogram([np.array(values)], bin_count=bin_count)
    assert result.edges == edges
    assert_numpy_counts_the_same(result, np.array(values), Scope.ALL)


def test_a_small_spread_at_a_large_offset_has_many_bins() -> None:
    values = 1e8 + np.random.default_rng(0).normal(scale=1e-3, size=1000)
    result = histogram(np.split(values, 10), bin_count=64)
    assert len(result.edges) > 32
    assert_numpy_counts_the_same(result, values, Scope.ALL)


def test_64_bins_are_the_default() -> None:
    result = histogram([np.linspace(0.0, 63.9, 1000)])
    assert result.edges == tuple(range(65))


@given(values=ARRAYS, scope=st.sampled_from(Scope), data=st.data())
def test_given_edges_count_as_in_numpy(values: Array, scope: Scope, data: st.DataObject) -> None:
    finite = st.floats(-1e9, 1e9) | st.sampled_from([*values[np.isfinite(values)].tolist(), 0.0])
    edges = tuple(sorted(data.draw(st.sets(finite, min_size=2, max_size=6))))
    cuts = data.draw(st.lists(st.integers(0, len(values)), max_size=3).map(sorted))
    result = histogram(np.split(values, cuts), scope, edges=edges)
    assert result.edges == edges
    assert_numpy_counts_the_same(result, values, scope)


@pytest.mark.parametrize("parameters", [{"bin_count": 50}, {"edges": (-1.0, 0.0, 0.1, 5.0)}])
@pytest.mark.parametrize("scope", Scope)
def test_many_blocks_are_one(parameters: dict[str, object], scope: Scope) -> None:
    values = np.random.default_rng(0).normal(size=(2, 3, 500_000))
    assert_numpy_counts_the_same(histogram([values], scope, **parameters), values, scope)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16])
def test_every_real_dtype_is_counted(dtype: torch.dtype) -> None:
    value = torch.arange(12).reshape(3, 4).to(dtype)
    accumulator = Accumulator(HISTOGRAM, parameters=StatisticParameters(bin_count=5))
    accumulator.update(value)
    assert_numpy_counts_the_same(accumulator.result(), value.double().numpy(), Scope.ALL)


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("shape", [(0, 3), (2, 3, 0)])
def test_nothing_is_counted_as_zeros(shape: tuple[int, ...], scope: Scope) -> None:
    for parameters in ({"bin_count": 4}, {"edges": (0.0, 1.0, 2.0)}):
        result = histogram([np.empty(shape)], scope, **parameters)
        assert_numpy_counts_the_same(result, np.empty(shape), scope)
