"""Statistic requests: validation, and the size of their reply, before anything is computed."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.stats import covariance, sketch
from trocar_server.tensors.stats.groups import resolve_channel_dim, resolve_peak_dim
from trocar_server.tensors.stats.statistic import Scope, Statistic, StatisticParameters
from trocar_server.tensors.stats.summary import needed_parts

MAX_QUANTILES = 1024
MAX_BINS = 1 << 16
_STATE_HEADER_BYTES = 8192


def find_problem(
    statistics: Sequence[Statistic], scope: Scope, parameters: StatisticParameters
) -> tuple[str, str] | None:
    """Validate a request: returns the wrong field, and the problem with its remedy; None if valid.

    The field is named as in a `Tap` message: `statistics`, `quantiles`, `histogram.edges` or
    `histogram.bin_count`.
    """
    problems = (
        *_scope_problems(statistics, scope),
        *_quantile_problems(Statistic.QUANTILES in statistics, parameters.quantiles),
        *_histogram_problems(Statistic.HISTOGRAM in statistics, parameters),
    )
    return problems[0] if problems else None


def check_request(statistics: Sequence[Statistic], scope: Scope, parameters: StatisticParameters) -> None:
    """Reject a request for which `find_problem` finds a problem.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    problem = find_problem(statistics, scope, parameters)
    if problem is not None:
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, ": ".join(problem))


def number_count(
    statistics: Sequence[Statistic],
    scope: Scope,
    shape: Sequence[int],
    channel_dim: int | None,
    parameters: StatisticParameters,
) -> int:
    """Return the most float64 numbers in the statistics of a tensor of this shape.

    Edges count, the covariance does not: it is a tensor of its own, of shape (channels, channels). A
    histogram with automatic edges may turn out to have fewer bins.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the shape has no dimension for the scope or the channels, or
            `REDUCTION_REJECTED`, it has too many channels for a covariance or for quantiles.
    """
    resolved = resolve_channel_dim(scope, len(shape), channel_dim)
    if Statistic.ARGMAX_CHANNEL in statistics:
        resolve_peak_dim(scope, len(shape), channel_dim)
    groups = 1 if scope is Scope.ALL else shape[resolved or 0]
    if Statistic.COVARIANCE in statistics:
        covariance.check_channel_count(groups)
    if Statistic.QUANTILES in statistics and scope is not Scope.SAMPLE:
        sketch.check_group_count(groups, math.prod(shape))
    has_edges = Statistic.HISTOGRAM in statistics
    per_group = sum(_numbers_per_group(statistic, parameters) for statistic in dict.fromkeys(statistics))
    return groups * per_group + (parameters.most_bins + 1 if has_edges else 0)


def state_byte_count(
    statistics: Sequence[Statistic],
    scope: Scope,
    shape: Sequence[int],
    channel_dim: int | None,
    parameters: StatisticParameters,
) -> int:
    """Return the most bytes of `Accumulator.state`, after any number of tensors of this shape.

    Raises:
        ServiceError: As `number_count`, and `INVALID_ARGUMENT` for scope sample, which has no state.
    """
    check_resumable(scope)
    number_count(statistics, scope, shape, channel_dim, parameters)
    resolved = resolve_channel_dim(scope, len(shape), channel_dim)
    groups = 1 if resolved is None else shape[resolved]
    numbers = groups * (1 + sum(part.value.rows for part in needed_parts(statistics)))
    if Statistic.QUANTILES in statistics:
        numbers += max(sketch.HELD_ELEMENTS, groups) + 2 * groups
    if Statistic.HISTOGRAM in statistics:
        numbers += groups * max(parameters.most_bins, 2)
    if Statistic.COVARIANCE in statistics:
        numbers += groups * (groups + 1) // 2 + 2 * groups
    if Statistic.ARGMAX_CHANNEL in statistics:
        numbers += shape[resolve_peak_dim(scope, len(shape), channel_dim)]
    return 8 * numbers + _STATE_HEADER_BYTES


def check_resumable(scope: Scope) -> None:
    """Reject the scope that has no state.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    if scope is Scope.SAMPLE:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            "statistics of scope 'sample' have no state: each sample stands for itself; use scope 'all' or "
            "'channel'",
        )


def _numbers_per_group(statistic: Statistic, parameters: StatisticParameters) -> int:
    special = {
        Statistic.QUANTILES: len(parameters.quantiles),
        Statistic.HISTOGRAM: parameters.most_bins,
        Statistic.COVARIANCE: 0,
    }
    return special.get(statistic, 1)


def _scope_problems(statistics: Sequence[Statistic], scope: Scope) -> Iterator[tuple[str, str]]:
    if Statistic.COVARIANCE in statistics and scope is not Scope.CHANNEL:
        yield "statistics", f"covariance is of channels, not of scope '{scope}'; use scope 'channel'"
    if Statistic.ARGMAX_CHANNEL in statistics and scope is Scope.CHANNEL:
        yield "statistics", "argmax_channel compares channels; use scope 'all' or 'sample'"


def _quantile_problems(is_wanted: bool, quantiles: Sequence[float]) -> Iterator[tuple[str, str]]:
    if is_wanted and not quantiles:
        yield "quantiles", "is empty; give at least one, for example 0.05, 0.5, 0.95"
    if quantiles and not is_wanted:
        yield "quantiles", "is given without the statistic quantiles; ask for it or leave them out"
    if len(quantiles) > MAX_QUANTILES:
        yield "quantiles", f"has {len(quantiles):,} entries, the limit is {MAX_QUANTILES:,}"
    wrong = next((share for share in quantiles if not 0.0 <= share <= 1.0), None)
    if wrong is not None:
        yield "quantiles", f"{wrong} is not between 0 and 1"


def _histogram_problems(is_wanted: bool, parameters: StatisticParameters) -> Iterator[tuple[str, str]]:
    edges, bin_count = parameters.edges, parameters.bin_count
    if (edges or bin_count is not None) and not is_wanted:
        yield "histogram", "is given without the statistic histogram; ask for it or leave it out"
    if edges and bin_count is not None:
        yield "histogram", "has edges and bin_count; give one of them"
    if bin_count is not None and not 1 <= bin_count <= MAX_BINS:
        yield "histogram.bin_count", f"is {bin_count:,}; 1 to {MAX_BINS:,} are allowed"
    if edges and not 2 <= len(edges) <= MAX_BINS + 1:
        yield "histogram.edges", f"has {len(edges):,} entries; 2 to {MAX_BINS + 1:,} are allowed"
    if not all(map(math.isfinite, edges)):
        yield "histogram.edges", "has an entry that is NaN or infinite"
    elif any(left >= right for left, right in pairwise(edges)):
        yield "histogram.edges", "must ascend, each entry above the one before"
