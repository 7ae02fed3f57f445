"""Statistics of one tensor, against NumPy in float64."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.unit.tensors.stats.oracle import PLAIN, Array, assert_same, expected, without_underflow
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.stats import Scope, Statistic, reduce

SHAPES = hnp.array_shapes(min_dims=2, max_dims=5, min_side=1, max_side=4)
FINITE = st.floats(-1e6, 1e6).map(without_underflow)
ANY = FINITE | st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0])
SCOPES = st.sampled_from(Scope)


def check(value: torch.Tensor, scope: Scope, channel_dim: int = 1) -> None:
    values = value.to(torch.float64).numpy()
    ours = reduce(value, PLAIN, scope, channel_dim)
    assert_same(ours.values, expected(values, scope, channel_dim), values)


@given(values=hnp.arrays(np.float64, SHAPES, elements=FINITE), scope=SCOPES)
def test_finite_values_agree_with_numpy(values: Array, scope: Scope) -> None:
    check(torch.from_numpy(values), scope)


@given(values=hnp.arrays(np.float64, SHAPES, elements=ANY), scope=SCOPES)
def test_nan_and_inf_propagate_as_in_numpy(values: Array, scope: Scope) -> None:
    check(torch.from_numpy(values), scope)


@given(values=hnp.arrays(np.float64, SHAPES, elements=FINITE), data=st.data())
def test_any_dimension_may_hold_the_channels(values: Array, data: st.DataObject) -> None:
    channel_dim = data.draw(st.integers(-values.ndim, values.ndim - 1))
    ours = reduce(torch.from_numpy(values), PLAIN, Scope.CHANNEL, channel_dim)
    assert ours.channel_dim == channel_dim % values.ndim
    assert_same(ours.values, expected(values, Scope.CHANNEL, channel_dim), values)


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16]
)
def test_every_real_dtype_is_computed_in_float64(dtype: torch.dtype, scope: Scope) -> None:
    value = (torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)) * 9).abs().to(dtype)
    check(value, scope)


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3, 0), (0, 0)])
def test_nothing_has_no_mean_and_no_extremes(shape: tuple[int, ...], scope: Scope) -> None:
    check(torch.empty(shape), scope)


@pytest.mark.parametrize("scope", [Scope.ALL, Scope.SAMPLE])
def test_a_vector_has_no_channels_but_samples(scope: Scope) -> None:
    check(torch.tensor([1.0, -2.0, 0.0]), scope)


def test_a_scalar_is_one_element() -> None:
    check(torch.tensor(-3.0), Scope.ALL)


@pytest.mark.parametrize("scope", Scope)
def test_strided_and_expanded_views_are_read_as_they_are(scope: Scope) -> None:
    base = torch.randn(4, 6, 5, 3, generator=torch.Generator().manual_seed(0))
    check(base.to(memory_format=torch.channels_last)[::2, 1:, :, ::2], scope)
    check(base[:, :1].expand(4, 7, 5, 3), scope)


def test_tiny_variance_at_a_large_offset_is_exact() -> None:
    """See Note: [A centre in two parts]; more than two blocks, so that they are merged."""
    noise = np.random.default_rng(0).normal(scale=1e-3, size=(5, 600_000))
    values = 1e8 + noise
    exact = exact_variance(values)
    ours = reduce(torch.from_numpy(values), [Statistic.VAR], Scope.ALL)
    assert ours.values[Statistic.VAR][0] == pytest.approx(exact, rel=1e-12, abs=0.0)


def exact_variance(values: Array) -> float:
    """Return the population variance in rational arithmetic; the elements are near 1e8."""
    steps = np.round((values.reshape(-1) - 1e8) * 2**27).astype(np.int64)
    assert np.array_equal(steps / 2**27 + 1e8, values.reshape(-1))
    total, squares = int(steps.sum()), int((steps * steps).sum())
    mean = Fraction(total, steps.size)
    return float((Fraction(squares, steps.size) - mean * mean) / 2**54)


def test_only_what_was_asked_for_comes_back_in_that_order() -> None:
    ours = reduce(torch.ones(2, 3), [Statistic.STD, Statistic.MEAN, Statistic.STD], Scope.ALL)
    assert list(ours.values.items()) == [(Statistic.STD, [0.0]), (Statistic.MEAN, [1.0])]


def test_values_are_plain_floats_and_the_tensor_is_untouched() -> None:
    value = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    before = value.detach().clone()
    ours = reduce(value, PLAIN, Scope.CHANNEL)
    assert {type(number) for numbers in ours.values.values() for number in numbers} == {float}
    assert torch.equal(value, before)


@pytest.mark.parametrize(
    ("shape", "scope", "channel_dim"),
    [((), Scope.SAMPLE, None), ((), Scope.CHANNEL, None), ((3,), Scope.CHANNEL, None),
     ((2, 3), Scope.CHANNEL, 2), ((2, 3), Scope.CHANNEL, -3)],
)  # fmt: skip
def test_a_scope_that_the_tensor_does_not_have_is_refused(
    shape: tuple[int, ...], scope: Scope, channel_dim: int | None
) -> None:
    with pytest.raises(ServiceError) as caught:
        reduce(torch.ones(shape), [Statistic.MEAN], scope, channel_dim)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


@pytest.mark.parametrize("value", [torch.ones(2, dtype=torch.complex64), torch.ones(2, 2).to_sparse()])
def test_complex_and_sparse_tensors_are_refused(value: torch.Tensor) -> None:
    with pytest.raises(ServiceError) as caught:
        reduce(value, [Statistic.MEAN], Scope.ALL)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


@pytest.mark.cuda
@pytest.mark.parametrize("scope", Scope)
def test_a_cuda_tensor_gives_what_numpy_gives(scope: Scope) -> None:
    value = torch.randn(8, 16, 100, 100, device="cuda")
    values = value.cpu().double().numpy()
    assert_same(reduce(value, PLAIN, scope).values, expected(values, scope), values)
