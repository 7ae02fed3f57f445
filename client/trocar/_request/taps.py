"""Taps: values to collect."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from trocar._base.delegation import explained
from trocar._request.positions import IndexExpression, Positions
from trocar._request.reductions import (
    CASTS,
    CastName,
    Reduction,
    Tokens,
    gather,
    lens_reduction,
    readout_reduction,
)
from trocar._request.statistic_options import DEFAULT_BINS, HistogramWanted, QuantilesWanted, Stat
from trocar._request.text_positions import TextPositions
from trocar_api.enums import numbers
from trocar_api.v1 import statistics_pb2 as pb
from trocar_api.v1 import tap_pb2
from trocar_api.value_words import not_one_of

Over = Literal["all", "channel", "sample"]

STATISTICS = numbers(pb.Statistic)
"""Wire statistic by name."""

SCOPES = numbers(pb.StatisticScope)
"""Wire scope by name."""


@dataclass(frozen=True)
class Tap:
    """Values and statistics to collect at one selector; made by `tap`."""

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
    padding: bool = False
    """Whether statistics and pools count padding."""
    positions: TextPositions | None = None
    """Of the texts: whose rows are wanted; all when None."""

    def __post_init__(self) -> None:
        _check_selector(self.selector)
        for name in self.names:
            if name not in STATISTICS:
                raise ValueError(f"a statistic {not_one_of(name, STATISTICS)}")
            if name in ("quantiles", "histogram") and self.names.count(name) > 1:
                raise ValueError(f"{name!r} is requested twice; give each statistic once")
        if self.over not in SCOPES:
            raise ValueError(f"over {not_one_of(self.over, SCOPES)}")
        if "covariance" in self.names and self.over != "channel":
            raise ValueError('a covariance is per channel; request it with over="channel"')
        if "argmax_channel" in self.names and self.over == "channel":
            raise ValueError('argmax_channel needs over="all" or over="sample"')
        if self.cast is not None and self.cast not in CASTS:
            raise ValueError(f"cast {not_one_of(self.cast, CASTS)}")
        if self.cast is not None and not self.values:
            raise ValueError("cast is only used with values")
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
        is_reduced = bool(self.reduce) or self.positions is not None or self.cast == "int8_per_channel"
        return self.over == "channel" or "argmax_channel" in self.names or is_reduced

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
        if self.padding:
            message.includes_padding = True
        if self.positions is not None:
            message.positions.CopyFrom(self.positions.to_wire())
        return message


def _check_selector(selector: object) -> None:
    if not isinstance(selector, str):
        raise TypeError(f"the selector of a tap is {selector!r}; give a text such as 'layer4'")


def _fill_options(message: tap_pb2.Tap, stat: Stat) -> None:
    """Write the options of a statistic; one given by name has its defaults."""
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


@explained
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
    tokens: Tokens | None = None,
    index: IndexExpression | None = None,
    reduce: Reduction | Iterable[Reduction] = (),
    cast: CastName | None = None,
    gradient: bool = False,
    padding: bool = False,
    positions: TextPositions | None = None,
) -> Tap:
    """Declare the values and statistics to collect at one selector, with options.

        tap("layer4", stats=["mean", "std"], values=False)
        tap("layer1.0.conv1", alias="edges", stats=["absmax"], over="channel")
        tap("layer4", channels=[3, 17], reduce=[pool("avg")], cast="float16")
        tap("layer3", stats=["skewness", trocar.quantiles(0.05, 0.5, 0.95), trocar.histogram(bins=32)])

    Args:
        selector: `[kind:]path[:Type][@call][#order][/port][[pick]]`, for example "layer4", "layer*.0.relu@1",
            "fc/in"; `selector` builds one from its parts.
        alias: A name for the feature map; the selector must then match one value.
        stats: Any of "mean", "var" (population), "std" (population), "min", "max", "absmax", "l2",
            "zero_fraction", "nan_count", "inf_count", "l1", "skewness", "kurtosis", "count", "argmax_channel"
            (over "all" or "sample"), "covariance" (over "channel"), "quantiles" (at 0, 0.25, 0.5, 0.75 and 1)
            or `quantiles(...)`, "histogram" (64 bins) or `histogram(...)`.
        values: False leaves the values on the server and returns statistics and shape only.
        over: Compute statistics over "all" elements for one number, or per "channel" or "sample" for an array
            of numbers.
        channel_dim: The channel dimension of the value before reductions; negative counts from the end. By
            default where the model has them; where that is not known, the last of rank 3, otherwise 1.
        samples: Which samples of the batch; short for a first `trocar.samples(...)`.
        channels: Which channels; short for a `trocar.channels(...)` after the samples.
        tokens: Which tokens; short for a `trocar.tokens(...)` after the channels: positions, "cls", "last",
            a `trocar.span(...)` of the text, or a role of a chat, "system", "user" or "assistant".
        index: The result of `numpy.s_[...]`; short for a `trocar.index(...)` after the tokens.
        reduce: Further reductions, in order: `trocar.pool("avg")`, `trocar.top_k(5)` and others. At most 16
            in total. Statistics are computed after them.
        cast: The dtype of the values that are sent: "float16", "bfloat16", "int8" or "int8_per_channel".
        gradient: Whether to collect the gradient of the call's objective (`of=`) with respect to the value
            instead of the value: "layer4" then means "layer4/grad_out".
        padding: Whether statistics, pools, Gram matrices and top-k include padding tokens, according to the
            attention mask of the tokenizer or of the request.
        positions: The rows at these positions of the texts alone, `trocar.positions(...)`, before samples and
            channels are chosen; not with `tokens`. Texts with fewer of them than others are filled up with
            zeros at the end, which statistics and pools leave out.

    Raises:
        TypeError: An entry is not a reduction, or positions are not integers.
        ValueError: An unknown statistic, `over` or `cast`, or an option that has no meaning with the others.
    """
    if positions is not None and tokens is not None:
        raise ValueError("a tap has positions= or tokens=, not both")
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
        padding=padding,
        positions=positions,
    )


@explained
def lens(
    selector: str, *, top_k: int = 5, positions: TextPositions | None = None, alias: str | None = None
) -> Tap:
    """Read a layer of a causal language model by what follows its last block: the logit lens.

        maps = client.extract("llama", "The capital of France is", [trocar.lens("layer[20]", top_k=5)])
        maps.lens("layer[20]")[0][-1]         # the likely tokens of the first text's last position
        run = client.generate("llama", prompt, taps=[trocar.lens("layer[20]")])
        run.lens("layer[20]")[-1]

    The server applies the model's own final norm and head, and sends the most likely tokens of each position
    instead of the value. Values are the logarithms of their probabilities, (batch, tokens, top_k), under the
    name and ":lens", and their ids under this name and ".indices". Edits of the call do not act on norm and
    head here.

    Args:
        selector: One or more values (batch, tokens, width), of the width of the last block's output; or the
            model's own logits, '/out["logits"]', edits of norm and head included.
        top_k: How many tokens, 1 to 1,024.
        positions: Only these positions of the texts.
        alias: A name instead; the selector must then stand for one value.

    Raises:
        ValueError: `top_k` is below 1.
    """
    return tap(selector, alias=alias, reduce=lens_reduction(top_k), positions=positions)


@explained
def readout(
    name: str,
    at: str = "",
    *,
    pooled: bool = False,
    positions: TextPositions | None = None,
    alias: str | None = None,
) -> Tap:
    """Read a stored direction: its numbers for each token or sample instead of the value.

        maps = client.extract("llama", prompt, [trocar.readout("honest", "layer[12]")])
        maps["model.layers.12:honest"]        # (batch, tokens, 1): w @ x + b at each token
        run = client.generate("llama", prompt, taps=[trocar.readout("honest", "layer[12]")])

    Names of the values are those of the places, followed by `:` and the name of the direction. Of two classes
    a number above 0 means the second one, for "logistic" it is the log-odds.

    Args:
        name: The name of a direction of yours for the model; see `Client.fit_direction`.
        at: Its place, a selector; all places of this name when empty.
        pooled: Whether values are averaged over their positions first, as for the fit: one row for each
            sample.
        positions: Only these positions of the texts.
        alias: A name instead; the direction must then have one place.
    """
    reading = readout_reduction(name, is_pooled=pooled)
    return tap(at, alias=alias, reduce=reading, positions=positions)


def gradient_tap(at: str | Tap) -> Tap:
    """Return the tap of the gradient with respect to a value."""
    return replace(at, gradient=True) if isinstance(at, Tap) else Tap(at, gradient=True)
