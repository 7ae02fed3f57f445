"""Taps of the inputs that drive channels: the largest values, their positions, and the value's dimensions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

import numpy as np
from numpy.typing import NDArray

from trocar._analysis.analysis_taps import one_tap, value_taps
from trocar._analysis.top_inputs.places import ValueFrame
from trocar._analysis.top_inputs.top_inputs import By
from trocar._request.reductions import channels as channels_of
from trocar._request.reductions import peak, pool
from trocar._request.taps import Tap, tap
from trocar_api.value_words import not_one_of

if TYPE_CHECKING:
    from trocar._base.tensors import Array
    from trocar._result.extraction_plan import ExtractionPlan
    from trocar._result.feature_maps import FeatureMapInfo, FeatureMaps

_PEAK, _MEAN, _WHOLE = "peak", "mean", "value"
"""Names of the feature maps of the pass."""
_INDICES = f"{_PEAK}.indices"


@dataclass(frozen=True)
class TopInputTaps:
    """What a pass collects."""

    where: Tap
    """The caller's tap, of one value."""
    channels: tuple[int, ...]
    """Empty for all."""
    by: By
    has_positions: bool = True
    """Whether the value has dimensions besides samples and channels."""

    @property
    def name(self) -> str:
        """The name of the feature map."""
        return self.where.alias or self.where.selector

    def planned(self, plan: ExtractionPlan) -> TopInputTaps:
        """Return the taps for a value of the plan.

        Raises:
            ValueError: The tap matches several values, or one without channels.
        """
        entries = list(plan.feature_maps.values())
        if len(entries) != 1:
            names = ", ".join(list(plan.feature_maps)[:5])
            raise ValueError(f"{self.where.selector!r} matches {len(entries)} values: {names}; choose one")
        rank = len(entries[0].shape)
        if rank < 2:
            raise ValueError(f"{self.name!r} of shape {entries[0].shape} has no channels")
        return replace(self, has_positions=rank > 2)

    def listed(self) -> list[Tap]:
        """Return the taps of the pass."""
        chosen = (channels_of(list(self.channels)),) if self.channels else ()
        selector = self.where.selector
        if not self.has_positions:
            return [tap(selector, alias=_PEAK, reduce=chosen)]
        largest = tap(selector, alias=_PEAK, reduce=(*chosen, peak()))
        mean = tap(selector, alias=_MEAN, reduce=(*chosen, pool("avg")))
        whole = tap(selector, alias=_WHOLE, stats=["absmax"], values=False)
        return [largest, whole] if self.by == "max" else [largest, mean, whole]

    def values(self, maps: FeatureMaps) -> Array:
        """Return what is ranked, (samples, channels)."""
        return maps[_MEAN if self.has_positions and self.by == "mean" else _PEAK]

    def positions(self, maps: FeatureMaps) -> NDArray[np.int64] | None:
        """Return the numbers of positions, (samples, channels); None without positions."""
        return maps[_INDICES] if self.has_positions else None

    def frame(self, maps: FeatureMaps) -> ValueFrame | None:
        """Return the dimensions of a batch's values; None without positions."""
        if not self.has_positions:
            return None
        info: FeatureMapInfo = maps.info[_WHOLE]
        processed = next((entry for entry in maps.processed if entry.padded_length), None)
        return ValueFrame(info, processed)


def top_input_taps(at: str | Tap, channels: int | Iterable[int] | None, by: By) -> TopInputTaps:
    """Check what is asked for.

    Raises:
        ValueError: `by` is unknown, a channel is negative or named twice, or the tap reduces the value.
        TypeError: Channels are no integers.
    """
    if by not in get_args(By):
        raise ValueError(f"by {not_one_of(by, get_args(By))}")
    (where,) = value_taps(one_tap(at))
    if where != tap(where.selector, alias=where.alias):
        raise ValueError("top_inputs reduces the value itself; pass a selector, not a tap with options")
    return TopInputTaps(where, _numbers(channels), by)


def _numbers(channels: int | Iterable[int] | None) -> tuple[int, ...]:
    if channels is None:
        return ()
    listed = [channels] if isinstance(channels, (int, np.integer)) else list(channels)
    if any(isinstance(one, bool) or not isinstance(one, (int, np.integer)) for one in listed):
        raise TypeError("channels are whole numbers")
    numbers = tuple(int(one) for one in listed)
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ValueError(f"channels={list(numbers)[:8]}: give numbers from 0 on, each once")
    return numbers
