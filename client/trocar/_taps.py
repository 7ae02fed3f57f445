"""What to collect: taps, in the caller's words."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from trocar._statistic_options import DEFAULT_BINS, HistogramWanted, QuantilesWanted, Stat
from trocar_api.v1 import statistics_pb2 as pb
from trocar_api.v1 import tap_pb2

Over = Literal["all", "channel", "sample"]

STATISTICS: dict[str, pb.Statistic.ValueType] = {
    "mean": pb.STATISTIC_MEAN,
    "var": pb.STATISTIC_VAR,
    "std": pb.STATISTIC_STD,
    "min": pb.STATISTIC_MIN,
    "max": pb.STATISTIC_MAX,
    "absmax": pb.STATISTIC_ABSMAX,
    "l2": pb.STATISTIC_L2,
    "zero_fraction": pb.STATISTIC_ZERO_FRACTION,
    "nan_count": pb.STATISTIC_NAN_COUNT,
    "inf_count": pb.STATISTIC_INF_COUNT,
    "l1": pb.STATISTIC_L1,
    "skewness": pb.STATISTIC_SKEWNESS,
    "kurtosis": pb.STATISTIC_KURTOSIS,
    "quantiles": pb.STATISTIC_QUANTILES,
    "histogram": pb.STATISTIC_HISTOGRAM,
    "covariance": pb.STATISTIC_COVARIANCE,
    "argmax_channel": pb.STATISTIC_ARGMAX_CHANNEL,
    "count": pb.STATISTIC_COUNT,
}
"""Wire statistic by name."""

SCOPES: dict[str, pb.StatisticScope.ValueType] = {
    "all": pb.STATISTIC_SCOPE_ALL,
    "channel": pb.STATISTIC_SCOPE_CHANNEL,
    "sample": pb.STATISTIC_SCOPE_SAMPLE,
}
"""Wire scope by name."""


@dataclass(frozen=True)
class Tap:
    """What to collect at one selector; made by `tap`."""

    selector: str
    """For example "layer4", "layer*.0.relu@1" or "fc/in"."""
    alias: str | None = None
    """A name for the feature map; the selector must then stand for one value."""
    stats: tuple[Stat, ...] = ()
    """The wanted statistics: names, or what `quantiles` and `histogram` return."""
    values: bool = True
    """Whether the values are wanted."""
    over: Over = "all"
    """What the statistics are taken over."""
    channel_dim: int | None = None
    """Which dimension holds the channels; the server decides by rank when None."""

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in STATISTICS:
                raise ValueError(f"no statistic {name!r}; there is {', '.join(STATISTICS)}")
            if name in ("quantiles", "histogram") and self.names.count(name) > 1:
                raise ValueError(f"{name!r} is asked for twice; give all of it at once")
        if self.over not in SCOPES:
            raise ValueError(f"over={self.over!r} is not one of {', '.join(SCOPES)}")
        if "covariance" in self.names and self.over != "channel":
            raise ValueError('a covariance is of channels; ask for it with over="channel"')
        if "argmax_channel" in self.names and self.over == "channel":
            raise ValueError('argmax_channel has a meaning with over="all" or over="sample" only')
        if self.channel_dim is not None and self.over != "channel" and "argmax_channel" not in self.names:
            raise ValueError('channel_dim has a meaning with over="channel" or argmax_channel only')

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the wanted statistics."""
        return tuple(stat if isinstance(stat, str) else stat.name for stat in self.stats)

    def to_wire(self) -> tap_pb2.Tap:
        """Return the tap as a message."""
        message = tap_pb2.Tap(
            selector=self.selector,
            alias=self.alias or "",
            statistics=[STATISTICS[name] for name in self.names],
            channel_dim=self.channel_dim,
        )
        for stat in self.stats:
            _fill_options(message, stat)
        if not self.values:
            message.values = False
        if self.over != "all":
            message.scope = SCOPES[self.over]
        return message


def _fill_options(message: tap_pb2.Tap, stat: Stat) -> None:
    """Write what a statistic needs to know; one that is named alone has its defaults."""
    if stat == "quantiles":
        stat = QuantilesWanted()
    if stat == "histogram":
        stat = HistogramWanted()
    if isinstance(stat, QuantilesWanted):
        message.quantiles.extend(stat.shares)
    if isinstance(stat, HistogramWanted):
        message.histogram.edges.extend(stat.edges)
        if not stat.edges:
            message.histogram.bin_count = stat.bins or DEFAULT_BINS


def tap(
    selector: str,
    *,
    alias: str | None = None,
    stats: Stat | Iterable[Stat] = (),
    values: bool = True,
    over: Over = "all",
    channel_dim: int | None = None,
) -> Tap:
    """Say what to collect at one selector, where the selector alone does not say it all.

        tap("layer4", stats=["mean", "std"], values=False)
        tap("layer1.0.conv1", alias="edges", stats=["absmax"], over="channel")
        tap("layer3", stats=["skewness", trocar.quantiles(0.05, 0.5, 0.95), trocar.histogram(bins=32)])

    Args:
        selector: `path[:Type][@call][/port][[pick]]`, for example "layer4", "layer*.0.relu@1", "fc/in".
        alias: A name for the feature map; the selector must then stand for one value.
        stats: Any of "mean", "var" (population), "std" (population), "min", "max", "absmax", "l2",
            "zero_fraction", "nan_count", "inf_count", "l1", "skewness", "kurtosis", "count",
            "argmax_channel" (over "all" or "sample"), "covariance" (over "channel"), "quantiles" (of 0,
            0.25, 0.5, 0.75 and 1) or `quantiles(...)`, "histogram" (64 bins) or `histogram(...)`.
        values: False leaves the values on the server and returns statistics and shape only.
        over: What the statistics are taken over: "all" for one number, "channel" or "sample" for
            an array of numbers.
        channel_dim: Which dimension holds the channels, for over="channel" and "argmax_channel"; negative
            counts from the end. By default the last of a tensor of rank 3, (batch, tokens, width),
            otherwise 1.

    Raises:
        ValueError: An unknown statistic or `over`, one that does not go with it, or a `channel_dim`
            without over="channel".
    """
    wanted = (stats,) if isinstance(stats, (str, QuantilesWanted, HistogramWanted)) else tuple(stats)
    return Tap(selector, alias=alias, stats=wanted, values=values, over=over, channel_dim=channel_dim)
