"""What can be asked for, and how many numbers come back."""

from itertools import combinations

import pytest
import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.stats import (
    Accumulator,
    Scope,
    Statistic,
    StatisticParameters,
    find_problem,
    number_count,
    reduce,
)

S, P = Statistic, StatisticParameters
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("statistic", "scope", "parameters", "field"),
    [
        (S.COVARIANCE, Scope.ALL, P(), "statistics"),
        (S.COVARIANCE, Scope.SAMPLE, P(), "statistics"),
        (S.ARGMAX_CHANNEL, Scope.CHANNEL, P(), "statistics"),
        (S.QUANTILES, Scope.ALL, P(), "quantiles"),
        (S.MEAN, Scope.ALL, P(quantiles=(0.5,)), "quantiles"),
        (S.QUANTILES, Scope.ALL, P(quantiles=(0.5,) * 1025), "quantiles"),
        (S.QUANTILES, Scope.ALL, P(quantiles=(0.5, 1.1)), "quantiles"),
        (S.QUANTILES, Scope.ALL, P(quantiles=(-1e-9,)), "quantiles"),
        (S.QUANTILES, Scope.ALL, P(quantiles=(NAN,)), "quantiles"),
        (S.MEAN, Scope.ALL, P(bin_count=3), "histogram"),
        (S.MEAN, Scope.ALL, P(edges=(0.0, 1.0)), "histogram"),
        (S.HISTOGRAM, Scope.ALL, P(edges=(0.0, 1.0), bin_count=3), "histogram"),
        (S.HISTOGRAM, Scope.ALL, P(bin_count=0), "histogram.bin_count"),
        (S.HISTOGRAM, Scope.ALL, P(bin_count=-5), "histogram.bin_count"),
        (S.HISTOGRAM, Scope.ALL, P(bin_count=65_537), "histogram.bin_count"),
        (S.HISTOGRAM, Scope.ALL, P(edges=(0.0,)), "histogram.edges"),
        (S.HISTOGRAM, Scope.ALL, P(edges=tuple(map(float, range(65_538)))), "histogram.edges"),
        (S.HISTOGRAM, Scope.ALL, P(edges=(0.0, INF)), "histogram.edges"),
        (S.HISTOGRAM, Scope.ALL, P(edges=(0.0, NAN, 1.0)), "histogram.edges"),
        (S.HISTOGRAM, Scope.ALL, P(edges=(0.0, 0.0)), "histogram.edges"),
        (S.HISTOGRAM, Scope.ALL, P(edges=(0.0, 2.0, 1.0)), "histogram.edges"),
    ],
)
def test_what_is_impossible_is_refused_with_its_field(
    statistic: Statistic, scope: Scope, parameters: StatisticParameters, field: str
) -> None:
    problem = find_problem([statistic], scope, parameters)
    assert problem is not None
    assert problem[0] == field
    with pytest.raises(ServiceError) as caught:
        Accumulator([statistic], scope, None, parameters)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    assert caught.value.message.startswith(field)


@pytest.mark.parametrize(
    ("statistic", "parameters"),
    [
        (S.QUANTILES, P(quantiles=(1.0, 0.0) * 512)),
        (S.HISTOGRAM, P(bin_count=1)),
        (S.HISTOGRAM, P(bin_count=65_536)),
        (S.HISTOGRAM, P(edges=tuple(map(float, range(65_537))))),
        (S.HISTOGRAM, P()),
    ],
)
@pytest.mark.parametrize("scope", Scope)
def test_the_limits_themselves_are_allowed(
    statistic: Statistic, parameters: StatisticParameters, scope: Scope
) -> None:
    assert find_problem([statistic], scope, parameters) is None


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_numbers_are_as_many_as_foretold(scope: Scope, size: int) -> None:
    value = torch.arange(60.0).reshape(3, 4, 5)
    for statistics in combinations(Statistic, size):
        parameters = P(
            quantiles=(0.1, 0.9) if S.QUANTILES in statistics else (),
            edges=(0.0, 1.0, 5.0, 7.0) if S.HISTOGRAM in statistics else (),
        )
        if find_problem(statistics, scope, parameters):
            continue
        result = reduce(value, statistics, scope, 1, parameters)
        numbers = sum(map(len, result.values.values())) + len(result.edges)
        assert number_count(statistics, scope, value.shape, 1, parameters) == numbers


def test_automatic_bins_are_no_more_than_foretold() -> None:
    foretold = number_count([S.HISTOGRAM], Scope.CHANNEL, (3, 4, 5), 1, P(bin_count=9))
    result = reduce(torch.arange(60.0).reshape(3, 4, 5), [S.HISTOGRAM], Scope.CHANNEL, 1, P(bin_count=9))
    assert len(result.values[S.HISTOGRAM]) + len(result.edges) <= foretold == 4 * 9 + 10


@pytest.mark.parametrize(
    ("statistics", "scope", "shape", "channel_dim", "reason"),
    [
        ([S.MEAN], Scope.CHANNEL, (3,), None, ErrorReason.INVALID_ARGUMENT),
        ([S.MEAN], Scope.CHANNEL, (3, 4), 2, ErrorReason.INVALID_ARGUMENT),
        ([S.ARGMAX_CHANNEL], Scope.ALL, (3,), None, ErrorReason.INVALID_ARGUMENT),
        ([S.ARGMAX_CHANNEL], Scope.SAMPLE, (3, 4), 0, ErrorReason.INVALID_ARGUMENT),
        ([S.COVARIANCE], Scope.CHANNEL, (3, 4097), None, ErrorReason.REDUCTION_REJECTED),
        ([S.QUANTILES], Scope.CHANNEL, (300, 16_385), None, ErrorReason.REDUCTION_REJECTED),
    ],
)
def test_a_shape_that_has_no_answer_is_refused(
    statistics: list[Statistic],
    scope: Scope,
    shape: tuple[int, ...],
    channel_dim: int | None,
    reason: ErrorReason,
) -> None:
    parameters = P(quantiles=(0.5,) if S.QUANTILES in statistics else ())
    with pytest.raises(ServiceError) as caught:
        number_count(statistics, scope, shape, channel_dim, parameters)
    assert caught.value.reason is reason
