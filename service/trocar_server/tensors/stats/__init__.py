"""Summary statistics of feature maps, mergeable over batches; usable alone on any tensor.

    from trocar_server.tensors.stats import Scope, Statistic, reduce

    reduce(feature_map, [Statistic.MEAN, Statistic.STD], Scope.CHANNEL).values[Statistic.MEAN]

For more batches than fit in memory, feed an `Accumulator`.
"""

from trocar_server.tensors.stats.accumulator import Accumulator, reduce, results
from trocar_server.tensors.stats.statistic import (
    DEFAULT_BIN_COUNT,
    NO_PARAMETERS,
    Scope,
    Statistic,
    StatisticParameters,
    StatisticsResult,
    default_channel_dim,
)
from trocar_server.tensors.stats.statistic_requests import (
    check_request,
    find_problem,
    number_count,
    state_byte_count,
)

__all__ = [
    "DEFAULT_BIN_COUNT",
    "NO_PARAMETERS",
    "Accumulator",
    "Scope",
    "Statistic",
    "StatisticParameters",
    "StatisticsResult",
    "check_request",
    "default_channel_dim",
    "find_problem",
    "number_count",
    "reduce",
    "results",
    "state_byte_count",
]
