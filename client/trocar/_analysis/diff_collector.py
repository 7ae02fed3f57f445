"""Collector of a diff: the feature maps of two models, batch by batch; the result is a `Diff`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trocar._analysis.analysis_taps import value_taps
from trocar._analysis.diff import Diff, DiffRow
from trocar._analysis.differences import Differences
from trocar._analysis.ordering import in_execution_order
from trocar._request.taps import Tap

if TYPE_CHECKING:
    from trocar._analysis.analysis_taps import Taps
    from trocar._result.feature_maps import FeatureMapInfo, FeatureMaps


class DiffCollector:
    """Compares the feature maps of two models, batch by batch.

    Args:
        taps_a: Taps of the first model.
        taps_b: Taps of the second model, if they differ.
        outputs: Selectors of both models' outputs, among the taps, if they differ. All other feature maps
            are then paired by name, not by tap.

    Raises:
        ValueError: There is no tap, or one has values=False; or the taps do not pair up.
    """

    def __init__(
        self,
        taps_a: Taps,
        taps_b: Taps | Mapping[str, str | Tap] | None = None,
        outputs: tuple[str, str] | None = None,
    ) -> None:
        self.taps_a = value_taps(taps_a)
        self.taps_b = self.taps_a
        if taps_b is not None:
            self.taps_b = value_taps(list(taps_b.values()) if isinstance(taps_b, Mapping) else taps_b)
        self._is_by_name = taps_b is None or outputs is not None
        self._pairs = [outputs] if outputs else []
        if not self._is_by_name:
            names = list(taps_b) if isinstance(taps_b, Mapping) else [_key(tap) for tap in self.taps_a]
            self._pairs = _paired(names, self.taps_b)
        self._sums: dict[str, _Pair] = {}
        self._only: tuple[dict[str, None], dict[str, None]] = ({}, {})  # dicts as sets that keep the order
        self.info: dict[str, FeatureMapInfo] = {}
        self.batch_count = 0

    @property
    def needs_order(self) -> bool:
        """Whether the execution order cannot be read from the reply alone."""
        return len(self.taps_a) > 1 and len(self._sums) > 1

    def add(self, maps_a: FeatureMaps, maps_b: FeatureMaps) -> None:
        """Add the next batch.

        Raises:
            ValueError: Paired taps match different numbers of feature maps.
        """
        names = self._names(maps_a, maps_b)
        for name, name_b in names.items():
            pair = self._sums.setdefault(name, _Pair(name_b, maps_a[name].shape, maps_b[name_b].shape))
            pair.add(maps_a, maps_b, name)
        paired_b = set(names.values())
        self._only[0].update(dict.fromkeys(name for name in maps_a if name not in names))
        self._only[1].update(dict.fromkeys(name for name in maps_b if name not in paired_b))
        self.info.update(maps_a.info)
        self.batch_count += 1

    def result(
        self, model_a: str, model_b: str, tolerance: float, executed: Sequence[FeatureMapInfo] = ()
    ) -> Diff:
        """Return the comparison, its rows in execution order.

        Args:
            model_a: The first model.
            model_b: The second model.
            tolerance: Relative error up to which feature maps count as equal.
            executed: Every call of a pass of the first model, where `needs_order`.

        Raises:
            ValueError: There was no batch.
        """
        if not self.batch_count:
            raise ValueError("the inputs are empty; pass at least one batch")
        names = list(self._sums)
        if executed:
            names = in_execution_order(names, self.info, executed)
        rows = tuple(self._sums[name].row(name) for name in names)
        only_a, only_b = map(tuple, self._only)
        return Diff(rows, only_a, only_b, model_a, model_b, tolerance, self.batch_count)

    def _names(self, maps_a: FeatureMaps, maps_b: FeatureMaps) -> dict[str, str]:
        """Return the name in the second model by the name in the first."""
        outcome = {name: name for name in maps_a if name in maps_b.info} if self._is_by_name else {}
        for a, b in self._pairs:
            names_a, names_b = _standing_for(maps_a, a), _standing_for(maps_b, b)
            if len(names_a) != len(names_b):
                raise ValueError(
                    f"{a!r} stands for {len(names_a)} feature maps of {maps_a.model_id} and {b!r} for "
                    f"{len(names_b)} of {maps_b.model_id}; name them one by one"
                )
            outcome.update(zip(names_a, names_b, strict=True))
        return outcome


class _Pair:
    """One feature map of both models over all batches."""

    def __init__(self, name_b: str, shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> None:
        self._name_b = name_b
        self._shapes = (shape_a, shape_b)
        self._differences = Differences()

    def add(self, maps_a: FeatureMaps, maps_b: FeatureMaps, name: str) -> None:
        a, b = maps_a[name], maps_b[self._name_b]
        if a.shape == b.shape:
            self._differences.add(a, b)
        elif self._shapes[0] == self._shapes[1]:
            self._shapes = (a.shape, b.shape)

    def row(self, name: str) -> DiffRow:
        shape_a, shape_b = self._shapes
        sums = self._differences
        numbers = (sums.cosine, sums.relative_error, sums.max_difference)
        means = (sums.mean_a, sums.mean_b)
        if shape_a != shape_b:
            numbers, means = (math.nan, math.nan, math.nan), (math.nan, math.nan)
        nonfinite = (sums.nonfinite_a, sums.nonfinite_b)
        return DiffRow(name, self._name_b, shape_a, shape_b, *numbers, *nonfinite, *means)


def _paired(names: Sequence[str], taps_b: Sequence[Tap]) -> list[tuple[str, str]]:
    if len(names) != len(taps_b):
        raise ValueError(f"taps has {len(names)} entries and taps_b {len(taps_b)}; give both the same length")
    return [(name, _key(tap)) for name, tap in zip(names, taps_b, strict=True)]


def _key(tap: Tap) -> str:
    return tap.alias or tap.selector


def _standing_for(maps: FeatureMaps, name: str) -> tuple[str, ...]:
    outcome = (name,) if name in maps.info else maps.expansions.get(name, ())
    if not outcome:
        raise ValueError(
            f"{name!r} of taps_b is not a feature map of {maps.model_id}; it has {', '.join(maps)}"
        )
    return outcome
