"""Covariance of the channels, against `numpy.cov` in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.unit.tensors.stats.oracle import Array, tensor
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.stats import Accumulator, Scope, Statistic, reduce

COVARIANCE = [Statistic.COVARIANCE]


def covariance(pieces: list[Array], channel_dim: int | None = 1) -> Array:
    accumulator = Accumulator(COVARIANCE, Scope.CHANNEL, channel_dim)
    for piece in pieces:
        accumulator.update(tensor(piece))
    found = accumulator.result().covariance
    assert found is not None
    assert torch.equal(found, found.T) or found.isnan().any()
    return np.asarray(found.numpy())


def numpy_covariance(values: Array, channel_dim: int = 1) -> Array:
    rows = np.moveaxis(values, channel_dim, 0).reshape(values.shape[channel_dim], -1)
    with np.errstate(all="ignore"):
        return np.atleast_2d(np.cov(rows, bias=True))


def close(found: Array, wanted: Array, scale: float) -> None:
    """Compare to 1e-12 of the product of the two channels' standard deviations, at most `scale`."""
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12 * scale)


def correlated(size: int, channels: int = 5) -> Array:
    generator = np.random.default_rng(0)
    return generator.normal(size=(size, channels)) @ generator.normal(size=(channels, channels))


@given(
    values=hnp.arrays(
        np.float64, hnp.array_shapes(min_dims=2, max_dims=4, max_side=5), elements=st.floats(-9, 9)
    ),
    data=st.data(),
)
def test_any_tensor_in_any_batches_agrees_with_numpy(values: Array, data: st.DataObject) -> None:
    channel_dim = data.draw(st.integers(0, values.ndim - 1))
    split_dim = next(dim for dim in range(values.ndim) if dim != channel_dim)
    cuts = data.draw(st.lists(st.integers(0, values.shape[split_dim]), max_size=3).map(sorted))
    found = covariance(np.split(values, cuts, axis=split_dim), channel_dim)
    close(found, numpy_covariance(values, channel_dim), 81.0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float16, torch.bfloat16])
def test_every_real_dtype_is_computed_in_float64(dtype: torch.dtype) -> None:
    value = (torch.from_numpy(correlated(200)) * 3).to(dtype)
    found = reduce(value, COVARIANCE, Scope.CHANNEL).covariance
    assert found is not None
    close(found.numpy(), numpy_covariance(value.to(torch.float64).numpy()), 100.0)


@pytest.mark.parametrize("sizes", [[2000], [1] * 2000, [1990, 1, 9], [1, 1999]])
@pytest.mark.parametrize("offset", [1e8, -1e8])
def test_a_small_spread_at_a_large_offset_is_exact(sizes: list[int], offset: float) -> None:
    """The offset is added so that nothing is rounded; NumPy is asked about the values without it."""
    steps = np.round(correlated(2000) * 2**10) / 2**20
    assert np.array_equal((steps + offset) - offset, steps)
    wanted = numpy_covariance(steps)
    close(covariance(np.split(steps + offset, np.cumsum(sizes)[:-1])), wanted, wanted.max())


def test_many_blocks_are_one() -> None:
    values = np.random.default_rng(0).normal(size=(3, 4, 500_000))
    close(covariance([values]), numpy_covariance(values), 1.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_spoil_their_own_channel_only(value: float) -> None:
    values = correlated(30)
    values[17, 2] = value
    found = covariance(np.split(values, [5, 25]))
    others = [0, 1, 3, 4]
    assert np.isnan(found[2]).all()
    assert np.isnan(found[:, 2]).all()
    close(found[np.ix_(others, others)], numpy_covariance(values[:, others]), 100.0)


@pytest.mark.parametrize("shape", [(0, 3), (2, 3, 0)])
def test_of_no_elements_there_is_no_covariance(shape: tuple[int, ...]) -> None:
    found = covariance([np.empty(shape)])
    assert found.shape == (3, 3)
    assert np.isnan(found).all()


def test_empty_batches_change_nothing() -> None:
    values = correlated(10)
    found = covariance([np.empty((0, 5)), values, np.empty((0, 5))])
    assert np.array_equal(found, covariance([values]))


def test_without_any_tensor_there_are_no_channels() -> None:
    found = Accumulator(COVARIANCE, Scope.CHANNEL).result()
    assert found.covariance is not None
    assert found.covariance.shape == (0, 0)


def test_one_element_does_not_vary() -> None:
    assert np.array_equal(covariance([np.array([[3.0, -1.0]])]), np.zeros((2, 2)))


def test_the_covariance_is_no_list_of_numbers() -> None:
    result = reduce(torch.ones(2, 3), [Statistic.MEAN, *COVARIANCE], Scope.CHANNEL)
    assert result.values == {Statistic.MEAN: [1.0] * 3, Statistic.COVARIANCE: []}


@pytest.mark.parametrize("scope", [Scope.ALL, Scope.SAMPLE])
def test_other_scopes_have_no_covariance(scope: Scope) -> None:
    with pytest.raises(ServiceError, match="use scope 'channel'") as caught:
        reduce(torch.ones(2, 3), COVARIANCE, scope)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


def test_too_many_channels_are_refused_and_leave_no_trace() -> None:
    accumulator = Accumulator(COVARIANCE, Scope.CHANNEL)
    with pytest.raises(ServiceError, match="4,097 channels is too large") as caught:
        accumulator.update(torch.ones(2, 4097))
    assert caught.value.reason is ErrorReason.REDUCTION_REJECTED
    accumulator.update(torch.ones(2, 3))
    assert accumulator.result().covariance is not None
