"""Skewness and kurtosis, against SciPy in float64."""

from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch

from tests.unit.tensors.stats.oracle import Array, standard_moment, tensor
from trocar_server.tensors.stats import Accumulator, Scope, Statistic, reduce

MOMENTS = (Statistic.SKEWNESS, Statistic.KURTOSIS)


Merge = Callable[[list[Array]], Accumulator]


def scipy_moments(values: Array) -> list[float]:
    return [float(scipy.stats.skew(values)), float(scipy.stats.kurtosis(values))]


def moments(accumulator: Accumulator) -> list[float]:
    result = accumulator.result()
    return [result.values[statistic][0] for statistic in MOMENTS]


def fed(pieces: list[Array]) -> Accumulator:
    accumulator = Accumulator(MOMENTS)
    for piece in pieces:
        accumulator.update(tensor(piece))
    return accumulator


def merged_in_pairs(pieces: list[Array]) -> Accumulator:
    """Merge neighbours, then neighbours of these, as a tree does."""
    accumulators = [fed([piece]) for piece in pieces]
    while len(accumulators) > 1:
        for left, right in zip(accumulators[::2], accumulators[1::2], strict=False):
            left.merge(right)
        accumulators = accumulators[::2]
    return accumulators[0]


def skewed(size: int) -> Array:
    return np.random.default_rng(0).gamma(2.0, size=size)


@pytest.mark.parametrize("shape", [(1, 50), (8, 16, 5, 5), (3, 2_000_000)])
def test_one_tensor_agrees_with_scipy(shape: tuple[int, ...]) -> None:
    values = skewed(int(np.prod(shape)))
    found = reduce(tensor(values.reshape(shape)), MOMENTS, Scope.ALL).values
    np.testing.assert_allclose([found[s][0] for s in MOMENTS], scipy_moments(values), rtol=1e-12)


@pytest.mark.parametrize("merge", [fed, merged_in_pairs])
@pytest.mark.parametrize("offset", [0.0, 1e8, -1e8])
@pytest.mark.parametrize("sizes", [[1] * 1000, [100_000, 1, 7, 100_000], [1, 100_000, 3]])
def test_a_small_spread_at_a_large_offset_is_exact_over_many_merges(
    merge: Merge, offset: float, sizes: list[int]
) -> None:
    """The offset is added so that nothing is rounded; SciPy is asked about the values without it."""
    steps = np.round(skewed(sum(sizes)) * 2**10) / 2**20  # about 1e-3, and exact beside 1e8
    assert np.array_equal((steps + offset) - offset, steps)
    found = moments(merge(np.split(steps + offset, np.cumsum(sizes)[:-1])))
    np.testing.assert_allclose(found, scipy_moments(steps), rtol=1e-12)


@pytest.mark.parametrize("merge", [fed, merged_in_pairs])
def test_batches_that_differ_in_everything_merge(merge: Merge) -> None:
    """Centres, spreads and sizes from 1e-6 to 1e6; the mean is taken in rational arithmetic."""
    generator = np.random.default_rng(1)
    scales = 10.0 ** generator.uniform(-6, 6, size=(40, 2))
    pieces = [generator.normal(centre, spread, size=generator.integers(1, 200)) for centre, spread in scales]
    values = np.concatenate(pieces)
    wanted = [standard_moment(values, 3), standard_moment(values, 4) - 3.0]
    np.testing.assert_allclose(moments(merge(pieces)), wanted, rtol=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e8 + 0.1, -3.7e-12])
@pytest.mark.parametrize("sizes", [[1], [1] * 100, [1_000_003], [3, 100_000, 1]])
def test_equal_elements_have_no_shape_however_their_mean_is_rounded(value: float, sizes: list[int]) -> None:
    assert np.isnan(moments(fed([np.full(size, value) for size in sizes]))).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_nan_or_infinity_anywhere_makes_nan(value: float, position: int) -> None:
    pieces = [np.array([1.0, 2.0, 5.0]) for _ in range(3)]
    pieces[position][1] = value
    assert np.isnan(moments(fed(pieces))).all()
    assert np.isnan(moments(merged_in_pairs(pieces))).all()


@pytest.mark.parametrize("scale", [1e-60, 1e60])
def test_the_shape_does_not_depend_on_the_scale(scale: float) -> None:
    values = skewed(1000)
    found = moments(fed(np.split(values * scale, 10)))
    np.testing.assert_allclose(found, scipy_moments(values), rtol=1e-12)


def test_values_whose_squares_overflow_have_no_shape() -> None:
    """As in SciPy: 1e200 squared is infinite."""
    assert np.isnan(moments(fed([np.array([1e200, -1e200, 3e200])]))).all()


def test_groups_are_told_apart() -> None:
    values = skewed(240).reshape(4, 3, 20) * np.array([1.0, -1.0, 5.0])[:, None]
    found = reduce(torch.from_numpy(values), MOMENTS, Scope.CHANNEL, 1).values
    rows = values.transpose(1, 0, 2).reshape(3, -1)
    np.testing.assert_allclose(found[Statistic.SKEWNESS], scipy.stats.skew(rows, axis=1), rtol=1e-12)
    np.testing.assert_allclose(found[Statistic.KURTOSIS], scipy.stats.kurtosis(rows, axis=1), rtol=1e-12)
