"""Codec of statistics: between the wire and the engine."""

from collections.abc import Iterator
from typing import Any

from trocar_api.v1 import extraction_pb2, tap_pb2
from trocar_api.v1 import statistics_pb2 as pb
from trocar_server.rpc.codec.declarations import members_by_number
from trocar_server.tensors.stats import Scope, Statistic, StatisticParameters, StatisticsResult, find_problem

STATISTICS = members_by_number(pb.Statistic.DESCRIPTOR, Statistic)
SCOPES = members_by_number(pb.StatisticScope.DESCRIPTOR, Scope, Scope.ALL)

_WIRE_STATISTICS: Any = {statistic: wire for wire, statistic in STATISTICS.items()}
_WIRE_SCOPES: Any = {scope: wire for wire, scope in SCOPES.items() if wire}


def tap_parameters(tap: tap_pb2.Tap) -> StatisticParameters:
    """Parameters of the statistics of a tap; `statistics_problem` checks them."""
    bins = tap.histogram
    return StatisticParameters(
        quantiles=tuple(tap.quantiles),
        edges=tuple(bins.edges),
        bin_count=bins.bin_count if bins.HasField("bin_count") else None,
    )


def statistics_problem(tap: tap_pb2.Tap) -> tuple[str, str] | None:
    """Field of a tap that is incompatible with its statistics, and why; None if compatible.

    Args:
        tap: With known statistics and a known scope.
    """
    if tap.HasField("histogram") and pb.STATISTIC_HISTOGRAM not in tap.statistics:
        return "histogram", "is given without the statistic histogram; ask for it or leave it out"
    statistics = tuple(STATISTICS[kind] for kind in dict.fromkeys(tap.statistics))
    return find_problem(statistics, SCOPES[tap.scope], tap_parameters(tap))


def fill_statistics(
    message: extraction_pb2.FeatureMap, wanted: tuple[Statistic, ...], result: StatisticsResult
) -> None:
    """Write statistics into the description of a feature map, in the order asked for.

    A covariance has an entry without values: it is a feature map of its own.
    """
    message.scope = _WIRE_SCOPES[result.scope]
    message.statistics.extend(_entries(wanted, result))
    if result.channel_dim is not None:
        message.channel_dim = result.channel_dim


def _entries(wanted: tuple[Statistic, ...], result: StatisticsResult) -> Iterator[pb.StatisticResult]:
    for statistic in wanted:
        entry = pb.StatisticResult(statistic=_WIRE_STATISTICS[statistic], values=result.values[statistic])
        if statistic is Statistic.HISTOGRAM:
            entry.edges.extend(result.edges)
        if statistic is Statistic.QUANTILES:
            entry.rank_error = result.rank_error
        yield entry
