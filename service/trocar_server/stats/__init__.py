"""Summary numbers of feature maps, mergeable over batches; usable alone on any tensor.

    from trocar_server.stats import Scope, Statistic, reduce

    reduce(feature_map, [Statistic.MEAN, Statistic.STD], Scope.CHANNEL).values[Statistic.MEAN]

For more batches than fit in memory, feed an `Accumulator`.
"""

from trocar_server.stats.accumulator import Accumulator, reduce
from trocar_server.stats.requests import check_request, find_problem, number_count, state_byte_count
from trocar_server.stats.statistic import (
    DEFAULT_BIN_COUNT,
    NO_PARAMETERS,
    Scope,
    Statistic,
    StatisticParameters,
    StatisticsResult,
    default_channel_dim,
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
    "state_byte_count",
]
