"""Paths: the rule, the points of each batch, and what is added up along them."""

import numpy as np
import pytest
from captum.attr._utils.approximation_methods import approximation_parameters

from trocar._attribution.path import (
    Conductance,
    Interpolants,
    PathIntegral,
    convergence_delta,
    gauss_legendre,
)
from trocar._base.tensors import Array


@pytest.mark.parametrize("count", [1, 2, 7, 50])
def test_the_rule_is_captums_and_integrates_polynomials(count: int) -> None:
    rule = gauss_legendre(count)
    sizes, alphas = approximation_parameters("gausslegendre")
    np.testing.assert_allclose(rule.alphas, alphas(count))
    np.testing.assert_allclose(rule.weights, sizes(count))
    degree = 2 * count - 1
    assert (rule.weights * rule.alphas**degree).sum() == pytest.approx(1 / (degree + 1), rel=1e-10)


def ends() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((2, 3)).astype(np.float32), rng.standard_normal((2, 3)).astype(np.float32)


@pytest.mark.parametrize("per_batch", [1, 2, 3, 5, 9])
def test_batches_hold_the_points_in_order_and_are_equally_long(per_batch: int) -> None:
    end, start = ends()
    alphas = gauss_legendre(5).alphas
    path = Interpolants(end, start, alphas, per_batch)
    for _ in range(2):  # a stream may begin again
        batches = list(path)
        assert {len(batch) for batch in batches} == {per_batch * 2}
        points = np.concatenate([path.points(batch, index) for index, batch in enumerate(batches)])
        expected = [start + alpha * (end - start) for alpha in alphas]
        np.testing.assert_allclose(points, expected, atol=1e-6)
        assert batches[0].dtype == np.float32


def test_an_integral_does_not_depend_on_how_it_is_cut() -> None:
    rule, values = gauss_legendre(7), np.random.default_rng(1).standard_normal((7, 2, 3))
    expected = np.einsum("p,pab->ab", rule.weights, values)
    for size in (1, 3, 7):
        integral = PathIntegral(rule.weights)
        for first in range(0, 7, size):
            integral.add(values[first : first + size])
        np.testing.assert_allclose(integral.value, expected, rtol=1e-12)


def test_a_conductance_does_not_depend_on_how_it_is_cut() -> None:
    rng = np.random.default_rng(2)
    values, gradients = rng.standard_normal((7, 2, 3)), rng.standard_normal((7, 2, 3))
    expected = sum(gradients[i] * (values[i + 1] - values[i]) for i in range(6))
    for size in (1, 3, 7):
        total = Conductance()
        for first in range(0, 7, size):
            total.add(values[first : first + size], gradients[first : first + size])
        np.testing.assert_allclose(total.value, expected, rtol=1e-12)


def test_the_delta_is_what_does_not_add_up() -> None:
    attributions = np.array([[1.0, 2.0], [3.0, np.inf]])
    found = convergence_delta(attributions, np.array([5.0, 1.0]), np.array([1.0, 0.0]))
    np.testing.assert_array_equal(found, [-1.0, np.inf])
