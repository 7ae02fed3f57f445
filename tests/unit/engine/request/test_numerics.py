"""How far values may be from eager ones."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trocar_server.engine.request.numerics import Numerics, deviation, keeps_promise, worst_deviation

SEEDS = st.integers(0, 2**31)


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(SEEDS, st.sampled_from(list(Numerics)))
def test_equal_values_do_not_deviate(seed: int, numerics: Numerics) -> None:
    value = values(seed, 3, 5)
    assert deviation(numerics, value, value.clone()) < 1e-9


def test_exact_takes_no_other_bit() -> None:
    value = values(0, 4)
    assert deviation(Numerics.EXACT, value, torch.nextafter(value, value + 1)) == math.inf


@given(SEEDS, st.floats(1e-9, 1e-3))
def test_fast_is_the_norm_of_the_difference_over_that_of_the_value(seed: int, size: float) -> None:
    value = values(seed, 64).double()
    off = values(seed + 1, 64).double()
    found = value + off / off.norm() * value.norm() * size
    assert deviation(Numerics.FAST, value, found) == pytest.approx(size / 1e-5, rel=1e-6)


@given(SEEDS, st.floats(0.0, 0.3))
def test_bf16_is_the_cosine_whatever_the_length(seed: int, angle: float) -> None:
    value, other = values(seed, 64).double(), values(seed + 1, 64).double()
    other -= value * (other @ value) / (value @ value)
    found = 3 * (value / value.norm() * math.cos(angle) + other / other.norm() * math.sin(angle))
    expected = (1 - math.cos(angle)) / 1e-4
    assert deviation(Numerics.BF16, value, found) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("numerics", [Numerics.FAST, Numerics.BF16])
def test_what_is_not_finite_has_to_be_in_the_same_places(numerics: Numerics) -> None:
    value = torch.tensor([1.0, math.nan, math.inf, 2.0])
    assert deviation(numerics, value, value.clone()) < 1e-6
    assert deviation(numerics, value, torch.tensor([1.0, 1.0, math.inf, 2.0])) == math.inf
    assert deviation(numerics, torch.ones(4), value) == math.inf


@pytest.mark.parametrize("numerics", [Numerics.FAST, Numerics.BF16])
@pytest.mark.parametrize("expected", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("found", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_to_be_of_the_same_kind(
    numerics: Numerics, expected: float, found: float
) -> None:
    is_same = expected == found or (math.isnan(expected) and math.isnan(found))
    deviates = deviation(numerics, torch.tensor([1.0, expected]), torch.tensor([1.0, found]))
    assert deviates == (0.0 if is_same else math.inf)


@pytest.mark.parametrize("numerics", list(Numerics))
def test_zeros_have_to_stay_zeros(numerics: Numerics) -> None:
    assert deviation(numerics, torch.zeros(3), torch.zeros(3)) == 0.0
    assert deviation(numerics, torch.zeros(3), torch.full((3,), 1e-30)) == math.inf


@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("other", [torch.ones(2, 3), torch.ones(3).double(), torch.ones(1)])
def test_another_shape_or_dtype_is_infinitely_far(numerics: Numerics, other: torch.Tensor) -> None:
    assert deviation(numerics, torch.ones(3), other) == math.inf


def test_whole_numbers_have_to_be_equal() -> None:
    assert deviation(Numerics.BF16, torch.tensor([1, 2]), torch.tensor([1, 3])) == math.inf


@pytest.mark.parametrize("value", [[math.nan, 1.0], [-0.0, 1.0], [complex(math.nan, 1.0), 1.0]])
def test_equal_bits_are_exact(value: list[complex]) -> None:
    assert deviation(Numerics.EXACT, torch.tensor(value), torch.tensor(value)) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_negative_zero_is_not_exactly_zero(dtype: torch.dtype) -> None:
    zero = torch.zeros(2, dtype=dtype)
    assert deviation(Numerics.EXACT, zero, -zero) == math.inf


def test_the_worst_value_counts_and_names_have_to_agree() -> None:
    good, bad = values(0, 8), values(1, 8)
    assert worst_deviation(Numerics.FAST, {"a": good, "b": good}, {"a": good, "b": bad}) > 1
    assert worst_deviation(Numerics.FAST, {"a": good}, {"b": good}) == math.inf


def test_a_promise_that_is_only_just_kept_is_not_trusted() -> None:
    assert keeps_promise(0.5)
    assert not keeps_promise(0.95)
    assert not keeps_promise(math.nan)
