"""The numbers of a diff against NumPy over whole arrays."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trocar._analysis import differences
from trocar._analysis.differences import Differences
from trocar._base.tensors import Array


def compared(*pairs: tuple[Array, Array]) -> Differences:
    sums = Differences()
    for a, b in pairs:
        sums.add(a, b)
    return sums


numbers = st.floats(-1e8, 1e8, width=32)
pairs = hnp.array_shapes(max_dims=3, max_side=5).flatmap(
    lambda shape: st.tuples(*[hnp.arrays(np.float32, shape, elements=numbers)] * 2)
)


@given(pairs)
def test_numbers_are_numpys(pair: tuple[Array, Array]) -> None:
    a, b = (array.astype(np.float64).ravel() for array in pair)
    found = compared(pair)
    assert found.max_difference == np.abs(a - b).max()
    if np.linalg.norm(a):
        assert found.relative_error == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-12)
    if np.linalg.norm(a) * np.linalg.norm(b):
        cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        assert found.cosine == pytest.approx(cosine, rel=1e-9, abs=1e-12)


@given(pairs)
def test_batches_give_what_all_at_once_gives(pair: tuple[Array, Array]) -> None:
    a, b = pair
    whole, parts = compared((a, b)), compared((a[:1], b[:1]), (a[1:], b[1:]))
    assert parts.relative_error == pytest.approx(whole.relative_error, rel=1e-12)
    assert parts.cosine == pytest.approx(whole.cosine, rel=1e-12, nan_ok=True)
    assert parts.max_difference == whole.max_difference


def test_blocks_give_what_all_at_once_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 50, 7)).astype(np.float32)
    whole = compared((a, b))
    monkeypatch.setattr(differences, "_BLOCK", 16)
    blocks = compared((a, b))
    assert blocks.relative_error == pytest.approx(whole.relative_error, rel=1e-14)
    assert blocks.max_difference == whole.max_difference


def test_a_difference_of_one_step_beside_1e8_is_seen() -> None:
    a = np.full(1000, 1e8, np.float32)
    b = a.copy()
    b[7] = np.nextafter(b[7], np.float32(np.inf))
    found = compared((a, b))
    assert found.max_difference == 8.0
    assert found.relative_error == pytest.approx(8.0 / (1e8 * math.sqrt(1000)), rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.uint8, np.int64, np.bool_])
def test_small_dtypes_do_not_wrap(dtype: type[np.generic]) -> None:
    a, b = np.array([0, 1, 1], dtype), np.array([1, 0, 1], dtype)
    assert compared((a, b)).max_difference == 1.0
    assert compared((a, b)).relative_error == pytest.approx(1.0)


def test_complex_numbers_are_pairs() -> None:
    a, b = np.array([3 + 4j], np.complex64), np.array([3 + 0j], np.complex64)
    assert compared((a, b)).relative_error == pytest.approx(4 / 5)
    assert compared((a, b)).max_difference == 4.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_same_that_is_not_finite_on_both_sides_is_equal(value: float) -> None:
    a, b = np.array([1.0, value, 2.0]), np.array([1.0, value, 2.0])
    found = compared((a, b))
    assert (found.relative_error, found.max_difference, found.nonfinite_a, found.nonfinite_b) == (0, 0, 1, 1)
    assert found.cosine == pytest.approx(1)


@pytest.mark.parametrize(
    ("left", "right"), [(np.nan, 1.0), (1.0, np.inf), (np.inf, -np.inf), (np.nan, np.inf)]
)
def test_another_that_is_not_finite_on_one_side_is_infinitely_far(left: float, right: float) -> None:
    found = compared((np.array([5.0, left]), np.array([5.0, right])))
    assert (found.relative_error, found.max_difference) == (math.inf, math.inf)
    assert math.isnan(found.cosine)


def test_zeros_have_no_angle() -> None:
    zeros, ones = np.zeros(3), np.ones(3)
    assert compared((zeros, zeros)).relative_error == 0.0
    assert compared((zeros, ones)).relative_error == math.inf
    assert compared((ones, zeros)).relative_error == 1.0
    assert all(math.isnan(compared(pair).cosine) for pair in ((zeros, zeros), (zeros, ones), (ones, zeros)))


def test_nothing_is_equal_to_nothing() -> None:
    found = compared((np.zeros((0, 3)), np.zeros((0, 3))))
    assert (found.relative_error, found.max_difference) == (0.0, 0.0)
    assert math.isnan(found.cosine)


def test_numbers_whose_squares_overflow_are_no_agreement() -> None:
    found = compared((np.array([1e200]), np.array([2e200])))
    assert found.max_difference == 1e200
    assert not found.relative_error <= 1e-5
