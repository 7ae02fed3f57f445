"""Replies as flat numbers, and how two of them are compared."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import trocar
from tests.relations.layouts import Place
from trocar import Histogram

Part = tuple[str, str]
"""The feature map, and `values` or the name of a statistic."""
Parts = dict[Part, NDArray[Any]]


def parts(maps: trocar.FeatureMaps, rename: Mapping[str, str] | None = None) -> Parts:
    """Return everything that a reply says in numbers."""
    found: Parts = {}
    for name, info in maps.info.items():
        called = (rename or {}).get(name, name)
        if info.has_values:
            found[called, "values"] = np.asarray(maps[name])
        if info.cast is not None and info.cast.scales:
            found[called, "scales"] = np.asarray(info.cast.scales)
    for name, stats in maps.stats.items():
        for stat, value in stats.as_dict().items():
            called = (rename or {}).get(name, name)
            found[called, stat] = np.asarray(value.counts if isinstance(value, Histogram) else value)
            if isinstance(value, Histogram):
                found[called, "edges"] = np.asarray(value.edges)
    if maps.objective is not None:
        found["", "objective"] = np.asarray(maps.objective)
    return found


@dataclass(frozen=True)
class Difference:
    """One part of two replies that differs, or one refusal too many."""

    text: str
    kind: str = "refusal"
    """`values`, `objective`, the name of a statistic, or `refusal`."""
    place: Place | None = None
    """Where it was tapped."""

    def __str__(self) -> str:
        return self.text


@dataclass
class Comparison:
    """The result of one comparison.

    Attributes:
        places: Where feature maps were tapped, by name.
        compared: How many parts were compared.
        solid: The feature maps with a part that was finite and not constant.
        differences: Each part that differs.
    """

    places: dict[str, Place] = field(default_factory=dict)
    compared: int = 0
    solid: set[str] = field(default_factory=set)
    differences: list[Difference] = field(default_factory=list)

    def note(
        self, part: Part, one: Any, other: Any, same: Callable[[Any, Any], bool], where: str = ""
    ) -> None:
        """Compare one part."""
        self.compared += 1
        one, other = np.asarray(one), np.asarray(other)
        if is_solid(one) or (part[1] == "objective" and np.isfinite(one).all()):
            self.solid.add(part[0])
        if one.shape != other.shape:
            self._add(part, f"{where}: shape {one.shape} and {other.shape}")
        elif not same(one, other):
            self._add(part, f"{where}: {_distance(one, other)}")

    def refuse(self, text: str) -> None:
        """Record a refusal that is not true, or is of one way alone."""
        self.differences.append(Difference(text))

    def _add(self, part: Part, text: str) -> None:
        place = self.places.get(part[0])
        at = f" at {place.selector} {place.shape}" if place else ""
        self.differences.append(Difference(f"{part[0]} {part[1]}{at}{text}", part[1], place))


def is_solid(values: NDArray[Any]) -> bool:
    """Whether values are finite and not all the same; a single number need only be finite and not 0."""
    if values.dtype.kind not in "fiub" or not values.size or not np.isfinite(values).all():
        return False
    return bool(np.ptp(values) > 0) if values.size > 1 else bool(values.reshape(-1)[0] != 0)


def same_bits(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Compare dtype and every bit."""
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def close(tolerance: float) -> Callable[[NDArray[Any], NDArray[Any]], bool]:
    """Return a comparison relative to the largest finite value."""

    def same(one: NDArray[Any], other: NDArray[Any]) -> bool:
        if not one.size:
            return True
        first, second = one.astype(np.float64), other.astype(np.float64)
        finite = np.isfinite(second)
        largest = np.abs(second[finite]).max(initial=0.0)
        return np.allclose(first, second, rtol=tolerance, atol=tolerance * max(largest, 1e-3), equal_nan=True)

    return same


def _distance(one: NDArray[Any], other: NDArray[Any]) -> str:
    if one.dtype != other.dtype:
        return f"{one.dtype} and {other.dtype}"
    if one.size == 1:
        return f"{one.reshape(-1)[0]:.6g} and {other.reshape(-1)[0]:.6g}"
    first, second = one.astype(np.complex128), other.astype(np.complex128)
    with np.errstate(all="ignore"):
        apart, largest = (np.nanmax(np.abs(each), initial=0) for each in (first - second, second))
    return f"{one.shape} by up to {apart:.3g} of {largest:.3g}"
