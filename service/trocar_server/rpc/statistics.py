"""Statistics on the wire and ours."""

from trocar_api.v1 import statistics_pb2 as pb
from trocar_server.stats import Scope, Statistic

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
}
SCOPES: dict[pb.StatisticScope.ValueType, Scope] = {
    pb.STATISTIC_SCOPE_UNSPECIFIED: Scope.ALL,
    pb.STATISTIC_SCOPE_ALL: Scope.ALL,
    pb.STATISTIC_SCOPE_CHANNEL: Scope.CHANNEL,
    pb.STATISTIC_SCOPE_SAMPLE: Scope.SAMPLE,
}
