"""Statistics on the wire and ours."""

from collections.abc import Iterator

from trocar_api.v1 import extraction_pb2, tap_pb2
from trocar_api.v1 import statistics_pb2 as pb
from trocar_server.stats import Scope, Statistic, StatisticParameters, StatisticsResult, find_problem

STATISTICS: dict[pb.Statistic.ValueType, Statistic] = {
    pb.STATISTIC_MEAN: Statistic.MEAN,
    pb.STATISTIC_VAR: Statistic.VAR,
    pb.STATISTIC_STD: Statistic.STD,
    pb.STATISTIC_MIN: Statistic.MIN,
    pb.STATISTIC_MAX: Statistic.MAX,
    pb.STATISTIC_ABSMAX: Statistic.ABSMAX,
    pb.STATISTIC_L2: Statistic.L2,
    pb.STATISTIC_ZERO_FRACTION: Statistic.ZERO_FRACTION,
    pb.STATISTIC_NAN_COUNT: Statistic.NAN_COUNT,
    pb.STATISTIC_INF_COUNT: Statistic.INF_COUNT,
    pb.STATISTIC_L1: Statistic.L1,
    pb.STATISTIC_SKEWNESS: Statistic.SKEWNESS,
    pb.STATISTIC_KURTOSIS: Statistic.KURTOSIS,
    pb.STATISTIC_QUANTILES: Statistic.QUANTILES,
    pb.STATISTIC_HISTOGRAM: Statistic.HISTOGRAM,
    pb.STATISTIC_COVARIANCE: Statistic.COVARIANCE,
    pb.STATISTIC_ARGMAX_CHANNEL: Statistic.ARGMAX_CHANNEL,
    pb.STATISTIC_COUNT: Statistic.COUNT,
}
SCOPES: dict[pb.StatisticScope.ValueType, Scope] = {
    pb.STATISTIC_SCOPE_UNSPECIFIED: Scope.ALL,
    pb.STATISTIC_SCOPE_ALL: Scope.ALL,
    pb.STATISTIC_SCOPE_CHANNEL: Scope.CHANNEL,
    pb.STATISTIC_SCOPE_SAMPLE: Scope.SAMPLE,
}

_WIRE_STATISTICS = {statistic: wire for wire, statistic in STATISTICS.items()}
_WIRE_SCOPES = {scope: wire for wire, scope in SCOPES.items()}


def tap_parameters(tap: tap_pb2.Tap) -> StatisticParameters:
    """Return what the statistics of a tap need to know; `statistics_problem` checks it."""
    bins = tap.histogram
    return StatisticParameters(
        quantiles=tuple(tap.quantiles),
        edges=tuple(bins.edges),
        bin_count=bins.bin_count if bins.HasField("bin_count") else None,
    )


def statistics_problem(tap: tap_pb2.Tap) -> tuple[str, str] | None:
    """Return the field of a tap that its statistics do not go with, and why; None if they do.

    Args:
        tap: With known statistics and a known scope.
    """
    if tap.HasField("histogram") and pb.STATISTIC_HISTOGRAM not in tap.statistics:
        return "histogram", "is given without the statistic histogram; ask for it or leave it out"
    statistics = tuple(STATISTICS[kind] for kind in dict.fromkeys(tap.statistics))
    return find_problem(statistics, SCOPES[tap.scope], tap_parameters(tap))


def fill_statistics(
    message: extraction_pb2.FeatureMap, wanted: tuple[Statistic, ...], found: StatisticsResult
) -> None:
    """Write statistics into the description of a feature map, in the order asked for.

    A covariance has an entry without values: it is a feature map of its own.
    """
    message.scope = _WIRE_SCOPES[found.scope]
    message.statistics.extend(_entries(wanted, found))
    if found.channel_dim is not None:
        message.channel_dim = found.channel_dim


def _entries(wanted: tuple[Statistic, ...], found: StatisticsResult) -> Iterator[pb.StatisticResult]:
    for statistic in wanted:
        entry = pb.StatisticResult(statistic=_WIRE_STATISTICS[statistic], values=found.values[statistic])
        if statistic is Statistic.HISTOGRAM:
            entry.edges.extend(found.edges)
        if statistic is Statistic.QUANTILES:
            entry.rank_error = found.rank_error
        yield entry
