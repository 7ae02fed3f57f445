"""The taps that analyses send: a caller's own, with the statistics or values that they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from trocar._reductions import pool
from trocar._taps import Tap, tap

if TYPE_CHECKING:
    from trocar._extraction_plan import ExtractionPlan
    from trocar._feature_maps import FeatureMapInfo

Taps: TypeAlias = str | Tap | Sequence[str | Tap]


def as_taps(taps: Taps) -> list[Tap]:
    """Return taps as a list, selectors as taps without more.

    Raises:
        ValueError: There is none.
        TypeError: Something is neither a selector nor a tap.
    """
    chosen = [taps] if isinstance(taps, (str, Tap)) else list(taps)
    if not chosen:
        raise ValueError("no tap is given; pass at least one selector")
    for item in chosen:
        _check_kind(item)
    return [item if isinstance(item, Tap) else tap(item) for item in chosen]


def _check_kind(item: object) -> None:
    if not isinstance(item, (str, Tap)):
        raise TypeError(f"{type(item).__name__} is no tap; pass a selector or trocar.tap(...)")


def value_taps(taps: Taps) -> list[Tap]:
    """Return taps that send values.

    Raises:
        ValueError: There is none, or one has values=False.
        TypeError: Something is neither a selector nor a tap.
    """
    chosen = as_taps(taps)
    for item in chosen:
        if not item.values:
            raise ValueError(f"the tap {item.selector!r} has values=False; its values are needed")
    return chosen


def channel_taps(taps: Taps, stats: Sequence[str]) -> list[Tap]:
    """Return taps that leave the values on the server and take statistics over the channels.

    A caller's own tap keeps its alias, its reductions and its channel dimension.

    Raises:
        ValueError: There is none.
        TypeError: Something is neither a selector nor a tap.
    """
    return [replace(item, stats=tuple(stats), values=False, over="channel") for item in as_taps(taps)]


def overall_taps(taps: Sequence[Tap]) -> list[Tap]:
    """Return taps whose statistics any value has, to plan with."""
    return [replace(item, stats=("absmax",), over="all", channel_dim=None, reduce=()) for item in taps]


def one_tap(at: str | Tap) -> Tap:
    """Return the tap of one place.

    Raises:
        TypeError: It is neither a selector nor a tap.
    """
    _check_kind(at)
    return as_taps(at)[0]


def pooled(where: Tap) -> Tap:
    """Return a tap whose positions are averaged on the server: (samples, channels) is left."""
    return replace(where, reduce=(*where.reduce, pool("avg")))


def names_of(
    taps: Sequence[Tap], info: Mapping[str, FeatureMapInfo], expansions: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Return the feature maps that taps became, by tap and within a tap in execution order."""
    found: dict[str, None] = {}
    for item in taps:
        name = item.alias or item.selector
        found.update(dict.fromkeys((name,) if name in info else expansions[item.selector]))
    return tuple(found)


def with_channels(taps: Sequence[Tap], plan: ExtractionPlan) -> list[Tap]:
    """Return taps without the feature maps that have no channels, those of rank 0 and 1.

    Statistics over channels of these are refused, and a pattern may well stand for one of them.

    Raises:
        ValueError: Nothing is left.
    """
    chosen: list[Tap] = []
    for item in taps:
        names = names_of([item], plan.feature_maps, plan.expansions)
        kept = [name for name in names if len(plan.feature_maps[name].shape) >= 2]
        is_whole = len(kept) == len(names)
        chosen += [item] if is_whole else [replace(item, selector=name, alias=None) for name in kept]
    if not chosen:
        raise ValueError("none of the feature maps has channels; they are of rank 0 or 1")
    return chosen
