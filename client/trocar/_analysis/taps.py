"""The taps that analyses send: a caller's own, with the statistics or values that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from trocar._reductions import pool
from trocar._taps import Tap, tap

if TYPE_CHECKING:
    from trocar._feature_maps import FeatureMaps

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


def one_tap(at: str | Tap) -> Tap:
    """Return the tap of one place.

    Raises:
        TypeError: It is neither a selector nor a tap.
    """
    _check_kind(at)
    return as_taps(at)[0]


def pooled(where: Tap) -> Tap:
    """Return a tap whose positions are averaged on the server: (samples, channels) is left."""
    return replace(where, reduce=(pool("avg"),))


def names_of(maps: FeatureMaps, taps: Sequence[Tap]) -> tuple[str, ...]:
    """Return the feature maps that taps became, by tap and within a tap in execution order."""
    found: dict[str, None] = {}
    for item in taps:
        name = item.alias or item.selector
        found.update(dict.fromkeys((name,) if name in maps.info else maps.expansions[item.selector]))
    return tuple(found)
