"""Statistics as NumPy computes them in float64: the oracle of these tests."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from trocar_server.stats import Scope, Statistic

Array = npt.NDArray[np.float64]

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
}


def groups(values: Array, scope: Scope, channel_dim: int) -> list[Array]:
    """Split into the flat arrays that each give one number."""
    if scope is Scope.ALL:
        return [values.reshape(-1)]
    dim = channel_dim if scope is Scope.CHANNEL else 0
    return [np.take(values, index, axis=dim).reshape(-1) for index in range(values.shape[dim])]


def expected(values: Array, scope: Scope, channel_dim: int = 1) -> dict[Statistic, list[float]]:
    """Return every statistic, warnings of NumPy about NaN and Inf left aside."""
    with np.errstate(all="ignore"):
        parts = groups(values.astype(np.float64), scope, channel_dim)
        return {statistic: [float(of(part)) for part in parts] for statistic, of in NUMPY.items()}


def assert_same(
    ours: dict[Statistic, list[float]], theirs: dict[Statistic, list[float]], values: Array
) -> None:
    """Compare to 1e-12 of each number or, where sums cancel, of the largest finite element of `values`."""
    scale = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
    for statistic, numbers in ours.items():
        atol = 1e-12 * (scale**2 if statistic is Statistic.VAR else scale)
        np.testing.assert_allclose(numbers, theirs[statistic], rtol=1e-12, atol=atol, err_msg=statistic)
