"""What to collect: taps, in the caller's words."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

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
    stats: tuple[str, ...] = ()
    """Names of the wanted statistics."""
    values: bool = True
    """Whether the values are wanted."""
    over: Over = "all"
    """What the statistics are taken over."""
    channel_dim: int | None = None
    """Which dimension holds the channels; the server decides by rank when None."""

    def __post_init__(self) -> None:
        for name in self.stats:
            if name not in STATISTICS:
                raise ValueError(f"no statistic {name!r}; there is {', '.join(STATISTICS)}")
        if self.over not in SCOPES:
            raise ValueError(f"over={self.over!r} is not one of {', '.join(SCOPES)}")
        if self.channel_dim is not None and self.over != "channel":
            raise ValueError('channel_dim has a meaning with over="channel" only')

    def to_wire(self) -> tap_pb2.Tap:
        """Return the tap as a message."""
        message = tap_pb2.Tap(
            selector=self.selector,
            alias=self.alias or "",
            statistics=[STATISTICS[name] for name in self.stats],
            channel_dim=self.channel_dim,
        )
        if not self.values:
            message.values = False
        if self.over != "all":
            message.scope = SCOPES[self.over]
        return message


def tap(
    selector: str,
    *,
    alias: str | None = None,
    stats: Iterable[str] = (),
    values: bool = True,
    over: Over = "all",
    channel_dim: int | None = None,
) -> Tap:
    """Say what to collect at one selector, where the selector alone does not say it all.

        tap("layer4", stats=["mean", "std"], values=False)
        tap("layer1.0.conv1", alias="edges", stats=["absmax"], over="channel")

    Args:
        selector: `[kind:]path[:Type][@call][#order][/port][[pick]]`, for example "layer4", "layer*.0.relu@1",
            "fc/in"; `selector` writes one from its parts.
        alias: A name for the feature map; the selector must then stand for one value.
        stats: Any of "mean", "var" (population), "std" (population), "min", "max", "absmax", "l2",
            "zero_fraction", "nan_count", "inf_count".
        values: False leaves the values on the server and returns statistics and shape only.
        over: What the statistics are taken over: "all" for one number, "channel" or "sample" for
            an array of numbers.
        channel_dim: Which dimension holds the channels, for over="channel"; negative counts from
            the end. By default the last of a tensor of rank 3, (batch, tokens, width), otherwise 1.

    Raises:
        ValueError: An unknown statistic or `over`, or a `channel_dim` without over="channel".
    """
    names = (stats,) if isinstance(stats, str) else tuple(stats)
    return Tap(selector, alias=alias, stats=names, values=values, over=over, channel_dim=channel_dim)
