"""Analysis taps: a caller's taps, with the statistics or values that an analysis needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from trocar._request.reductions import pool
from trocar._request.taps import Tap, tap

if TYPE_CHECKING:
    from trocar._request.statistic_options import StatisticName
    from trocar._result.extraction_plan import ExtractionPlan
    from trocar._result.feature_maps import FeatureMapInfo

Taps: TypeAlias = str | Tap | Sequence[str | Tap]


def as_taps(taps: Taps) -> list[Tap]:
    """Return taps as a list; selectors become plain taps.

    Raises:
        ValueError: There is none.
        TypeError: Something is neither a selector nor a tap.
    """
    chosen = [taps] if isinstance(taps, (str, Tap)) else list(taps)
    if not chosen:
        raise ValueError("taps is empty; pass at least one selector")
    for item in chosen:
        _check_kind(item)
    return [item if isinstance(item, Tap) else tap(item) for item in chosen]


def _check_kind(item: object) -> None:
    if not isinstance(item, (str, Tap)):
        raise TypeError(f"{type(item).__name__} is not a tap; pass a selector or trocar.tap(...)")


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


def with_output(taps: Sequence[Tap], selector: str) -> list[Tap]:
    """Return taps with that of the model's output, if it is not among them."""
    is_there = any(selector in (item.alias, item.selector) for item in taps)
    return [*taps] if is_there else [*taps, tap(selector)]


def channel_taps(taps: Taps, stats: Sequence[StatisticName]) -> list[Tap]:
    """Return taps that leave the values on the server and take statistics over the channels.

    A caller's own tap keeps its alias, its reductions and its channel dimension.

    Raises:
        ValueError: There is none.
        TypeError: Something is neither a selector nor a tap.
    """
    return [replace(item, stats=tuple(stats), values=False, over="channel") for item in as_taps(taps)]


def overall_taps(taps: Sequence[Tap]) -> list[Tap]:
    """Return taps with statistics that any value has, for a dry run."""
    return [replace(item, stats=("absmax",), over="all", channel_dim=None, reduce=()) for item in taps]


def one_tap(at: str | Tap) -> Tap:
    """Return a single tap.

    Raises:
        TypeError: It is neither a selector nor a tap.
    """
    _check_kind(at)
    return as_taps(at)[0]


def pooled(where: Tap) -> Tap:
    """Return a tap whose positions are averaged on the server, to shape (samples, channels)."""
    return replace(where, reduce=(*where.reduce, pool("avg")))


def names_of(
    taps: Sequence[Tap], info: Mapping[str, FeatureMapInfo], expansions: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Return the feature maps of taps, by tap and within a tap in execution order."""
    result: dict[str, None] = {}
    for item in taps:
        name = item.alias or item.selector
        result.update(dict.fromkeys((name,) if name in info else expansions[item.selector]))
    return tuple(result)


def with_channels(taps: Sequence[Tap], plan: ExtractionPlan) -> list[Tap]:
    """Return taps whose feature maps have channels, of rank 2 and above.

    Statistics over channels of these are rejected, and a pattern may match one of them.

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
