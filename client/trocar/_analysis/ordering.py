"""Execution order of feature maps that several taps collect.

Replies have them by tap, and only within a tap in execution order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trocar._result.feature_maps import FeatureMapInfo

EVERYTHING = "**"
"""The selector whose feature maps give the order: every call of every module, as each one ends."""


def in_execution_order(
    names: Sequence[str], info: Mapping[str, FeatureMapInfo], executed: Sequence[FeatureMapInfo]
) -> list[str]:
    """Sort feature maps by the time of their values: an input before the module runs, an output after.

    Args:
        names: Names to sort.
        info: Metadata of each.
        executed: The outputs of every call of a pass, in execution order.

    Returns:
        The names. One without a position in `executed`, such as a node of a graph, keeps its predecessor.
    """
    ended = {(entry.path, entry.call_index): place for place, entry in reversed(list(enumerate(executed)))}
    keys: dict[str, float] = {}
    last = -math.inf
    for name in names:
        place = _place(info[name], ended)
        last = keys[name] = last if place is None else place
    return sorted(names, key=keys.__getitem__)


def _place(info: FeatureMapInfo, ended: Mapping[tuple[str, int], int]) -> float | None:
    if not info.path:
        return -math.inf if _is_input(info) else math.inf
    end = ended.get((info.path, info.call_index))
    if end is None or not _is_input(info):
        return end
    previous = ended.get((info.path, info.call_index - 1))
    if previous is not None:
        return previous + 0.5
    inside = [place for (path, _), place in ended.items() if path.startswith(f"{info.path}.")]
    return min([end, *inside]) - 0.5


def _is_input(info: FeatureMapInfo) -> bool:
    return info.port.removeprefix("grad_").startswith("in")
