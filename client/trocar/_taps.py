"""What to collect: taps, in the caller's words."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from trocar._positions import IndexExpression, Positions
from trocar._reductions import CASTS, CastName, Reduction, gather
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
    reduce: tuple[Reduction, ...] = ()
    """What is done to the value on the server, in order, before anything else."""
    cast: CastName | None = None
    """What the values are sent as; as they are when None."""
    gradient: bool = False
    """Whether the gradient of the objective with respect to the value is meant instead of the value."""

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
        if self.cast is not None and self.cast not in CASTS:
            raise ValueError(f"no cast {self.cast!r}; there is {', '.join(CASTS)}")
        if self.cast is not None and not self.values:
            raise ValueError("cast has a meaning with values only")
        if self.channel_dim is not None and not self._uses_channels:
            raise ValueError(
                'channel_dim has a meaning with over="channel", argmax_channel, reduce and per-channel '
                "casts only"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the wanted statistics."""
        return tuple(stat if isinstance(stat, str) else stat.name for stat in self.stats)

    @property
    def _uses_channels(self) -> bool:
        is_cast = self.cast == "int8_per_channel"
        return self.over == "channel" or "argmax_channel" in self.names or bool(self.reduce) or is_cast

    def payloads(self) -> list[memoryview]:
        """Return the bytes of the arrays of its reductions, in the order of the request's payloads."""
        return [payload for reduction in self.reduce for payload in reduction.payloads()]

    def to_wire(self) -> tap_pb2.Tap:
        """Return the tap as a message."""
        message = tap_pb2.Tap(
            selector=self.selector,
            alias=self.alias or "",
            statistics=[STATISTICS[name] for name in self.names],
            channel_dim=self.channel_dim,
            reductions=[reduction.to_wire() for reduction in self.reduce],
            cast=None if self.cast is None else CASTS[self.cast],
        )
        for stat in self.stats:
            _fill_options(message, stat)
        if not self.values:
            message.values = False
        if self.over != "all":
            message.scope = SCOPES[self.over]
        if self.gradient:
            message.is_gradient = True
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


def tap(  # noqa: PLR0913 - one keyword for each thing that a tap can say
    selector: str,
    *,
    alias: str | None = None,
    stats: Stat | Iterable[Stat] = (),
    values: bool = True,
    over: Over = "all",
    channel_dim: int | None = None,
    samples: Positions | None = None,
    channels: Positions | None = None,
    tokens: Positions | None = None,
    index: IndexExpression | None = None,
    reduce: Reduction | Iterable[Reduction] = (),
    cast: CastName | None = None,
    gradient: bool = False,
) -> Tap:
    """Say what to collect at one selector, where the selector alone does not say it all.

        tap("layer4", stats=["mean", "std"], values=False)
        tap("layer1.0.conv1", alias="edges", stats=["absmax"], over="channel")
        tap("layer4", channels=[3, 17], reduce=[pool("avg")], cast="float16")
        tap("layer3", stats=["skewness", trocar.quantiles(0.05, 0.5, 0.95), trocar.histogram(bins=32)])

    Args:
        selector: `[kind:]path[:Type][@call][#order][/port][[pick]]`, for example "layer4", "layer*.0.relu@1",
            "fc/in"; `selector` writes one from its parts.
        alias: A name for the feature map; the selector must then stand for one value.
        stats: Any of "mean", "var" (population), "std" (population), "min", "max", "absmax", "l2",
            "zero_fraction", "nan_count", "inf_count", "l1", "skewness", "kurtosis", "count",
            "argmax_channel" (over "all" or "sample"), "covariance" (over "channel"), "quantiles" (of 0,
            0.25, 0.5, 0.75 and 1) or `quantiles(...)`, "histogram" (64 bins) or `histogram(...)`.
        values: False leaves the values on the server and returns statistics and shape only.
        over: What the statistics are taken over: "all" for one number, "channel" or "sample" for
            an array of numbers.
        channel_dim: Which dimension of the value, before reductions, holds the channels; negative counts
            from the end. By default the last of a tensor of rank 3, (batch, tokens, width), otherwise 1.
        samples: Which samples of the batch; short for a first `trocar.samples(...)`.
        channels: Which channels; short for a `trocar.channels(...)` after the samples.
        tokens: Which tokens; short for a `trocar.tokens(...)` after the channels.
        index: What `numpy.s_[...]` returns; short for a `trocar.index(...)` after the tokens.
        reduce: Further reductions, in order: `trocar.pool("avg")`, `trocar.top_k(5)` and their like.
            At most 16 in all. Statistics are taken of what they leave.
        cast: "float16", "bfloat16", "int8" or "int8_per_channel": what the values are sent as.
        gradient: Whether the gradient of the call's objective (`of=`) with respect to the value is meant
            instead of the value: "layer4" then stands for "layer4/grad_out".

    Raises:
        TypeError: A reduction is none, or positions are no integers.
        ValueError: An unknown statistic, `over` or `cast`, or an option that has no meaning with the others.
    """
    wanted = (stats,) if isinstance(stats, (str, QuantilesWanted, HistogramWanted)) else tuple(stats)
    return Tap(
        selector,
        alias=alias,
        stats=wanted,
        values=values,
        over=over,
        channel_dim=channel_dim,
        reduce=gather(samples=samples, channels=channels, tokens=tokens, index=index, reduce=reduce),
        cast=cast,
        gradient=gradient,
    )


def gradient_tap(at: str | Tap) -> Tap:
    """Return the tap of the gradient with respect to a value."""
    return replace(at, gradient=True) if isinstance(at, Tap) else Tap(at, gradient=True)
