"""Statistics as NumPy and SciPy compute them in float64: the oracle of these tests.

Where NumPy and SciPy lose digits themselves, to cancellation, the mean is taken in rational arithmetic.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch

from trocar_server.tensors.stats import Scope, Statistic

Array = npt.NDArray[np.float64]


def exact_deviations(values: Array) -> Array:
    """Return the deviations from the mean, each rounded once."""
    mean = sum(map(Fraction, values.tolist()), Fraction(0)) / values.size
    return np.array([float(Fraction(value) - mean) for value in values.tolist()])


def standard_moment(values: Array, order: int) -> float:
    """Return the mean of the standardised values to the power of `order`.

    NaN where `scipy.stats.skew` and `kurtosis` say so: of values that are equal in float64.
    """
    if not values.size or not np.isfinite(values).all():
        return np.nan
    deviations = exact_deviations(values)
    second = np.mean(deviations**2)
    if second <= (np.finfo(np.float64).eps * values.mean()) ** 2:
        return np.nan
    return float(np.mean(deviations**order) / second ** (order / 2))


NUMPY: dict[Statistic, Callable[[Array], float]] = {
    Statistic.MEAN: lambda values: values.mean() if values.size else np.nan,
    Statistic.VAR: lambda values: values.var() if values.size else np.nan,
    Statistic.STD: lambda values: values.std() if values.size else np.nan,
    Statistic.MIN: lambda values: values.min() if values.size else np.nan,
    Statistic.MAX: lambda values: values.max() if values.size else np.nan,
    Statistic.ABSMAX: lambda values: np.abs(values).max() if values.size else np.nan,
    Statistic.L2: lambda values: np.linalg.norm(values).item(),
    Statistic.ZERO_FRACTION: lambda values: (values == 0).mean() if values.size else np.nan,
    Statistic.NAN_COUNT: lambda values: np.isnan(values).sum(),
    Statistic.INF_COUNT: lambda values: np.isinf(values).sum(),
    Statistic.L1: lambda values: np.abs(values).sum(),
    Statistic.SKEWNESS: lambda values: standard_moment(values, 3),
    Statistic.KURTOSIS: lambda values: standard_moment(values, 4) - 3.0,
    Statistic.COUNT: lambda values: values.size,
}
PLAIN = tuple(NUMPY)
"""The statistics that are one number for each group, whatever the scope."""


def groups(values: Array, scope: Scope, channel_dim: int) -> list[Array]:
    """Split into the flat arrays that each give one number."""
    if scope is Scope.ALL:
        return [values.reshape(-1)]
    dim = channel_dim if scope is Scope.CHANNEL else 0
    return [np.take(values, index, axis=dim).reshape(-1) for index in range(values.shape[dim])]


def expected(values: Array, scope: Scope, channel_dim: int = 1) -> dict[Statistic, list[float]]:
    """Return every plain statistic, warnings of NumPy about NaN and Inf left aside."""
    with np.errstate(all="ignore"):
        parts = groups(values.astype(np.float64), scope, channel_dim)
        return {statistic: [float(of(part)) for part in parts] for statistic, of in NUMPY.items()}


def assert_same(
    ours: dict[Statistic, list[float]], theirs: dict[Statistic, list[float]], values: Array
) -> None:
    """Compare to 1e-12 of each number or, where sums cancel, of the largest finite element of `values`.

    Of standardised moments, which have no unit, to 1e-12 of the largest they can be, a power of the
    number of elements.
    """
    finite = values[np.isfinite(values)]
    scale = float(np.abs(finite).max(initial=0.0))
    scales = {Statistic.VAR: scale**2, Statistic.SKEWNESS: finite.size**0.5, Statistic.KURTOSIS: finite.size}
    for statistic, numbers in ours.items():
        atol = 1e-12 * scales.get(statistic, scale)
        np.testing.assert_allclose(numbers, theirs[statistic], rtol=1e-12, atol=atol, err_msg=statistic)


def numpy_quantiles(values: Array, shares: Sequence[float]) -> Array:
    """Return `numpy.quantile` of a vector.

    Except next to an infinite element, where NumPy 2.4 gives NaN even for a quantile that is an element:
    there `shares` must be at elements.
    """
    if not values.size:
        return np.full(len(shares), np.nan)
    if np.isinf(values).any() and not np.isnan(values).any():
        ranks = np.array(shares) * (values.size - 1)
        assert (ranks == np.round(ranks)).all()
        return np.asarray(np.sort(values)[ranks.astype(int)])
    return np.asarray(np.quantile(values, shares))


def without_underflow(value: float) -> float:
    """Return 0 for what is so small that its fourth power is lost."""
    return value if abs(value) >= 1e-30 else 0.0


def tensor(values: Array) -> torch.Tensor:
    """Return a tensor of its own memory."""
    return torch.from_numpy(values.copy())
