"""Health report rows, from the statistics of one gradient pass."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trocar._analysis.analysis_taps import names_of
from trocar._analysis.health import FLAGS, Health, HealthRow
from trocar._analysis.health_taps import gradients_of_parameters, norms_of_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trocar._analysis.health import Flag, HealthThresholds
    from trocar._request.taps import Tap
    from trocar._result.feature_maps import FeatureMapInfo, FeatureMaps
    from trocar._result.statistics import Statistics

_OF_A_GRADIENT = re.compile(r"(.*)/grad_(out|in(?:\(.*\))?)((?:\[.*\])?)", re.DOTALL)
"""A gradient's name: the value's before its port, the port without `grad_`, the pick."""


@dataclass(frozen=True)
class _Tensor:
    """The gradient of one value, or of all of a module's parameters together."""

    norm: float
    zero_fraction: float
    nan_count: int
    inf_count: int

    @property
    def is_dead(self) -> bool:
        return self.zero_fraction == 1.0


@dataclass(frozen=True)
class _Parameters:
    """The own parameters of one module that have a gradient."""

    name: str
    """The selector of all of them."""
    gradient: _Tensor
    weight_norm: float
    type: str

    @property
    def ratio(self) -> float | None:
        return self.gradient.norm / self.weight_norm if self.weight_norm else None


def health_of(
    maps: FeatureMaps,
    taps: Sequence[Tap],
    owners: Sequence[str],
    thresholds: HealthThresholds,
    names: Sequence[str] | None = None,
) -> Health:
    """Read the report from the statistics of a pass.

    Modules that are never called, and whose parameters the pass uses all the same, have a row before the
    first module that they are inside of; the model's own parameters have one at the end.

    Args:
        maps: Feature maps of the pass.
        taps: Those of `gradient_taps` that were sent.
        owners: Those of `owners_of` whose parameters were requested.
        thresholds: Limits for flags.
        names: The gradients at values in execution order; in the order of the reply when None.
    """
    parameters = _parameters(maps, owners)
    shown = names_of(taps, maps.info, maps.expansions) if names is None else names
    rows = [
        _row(_name(info), info.path, info.type, _tensor(maps, [name]), parameters.get(info.path), thresholds)
        for name in shown
        for info in [maps.info[name]]
    ]
    called = {row.path for row in rows}
    for path, own in parameters.items():
        if path not in called:
            row = _row(own.name, path, own.type, None, own, thresholds)
            rows.insert(_place(path, rows), row)
    return Health(tuple(rows), maps.objective, thresholds, maps.model_id)


def _parameters(maps: FeatureMaps, owners: Sequence[str]) -> dict[str, _Parameters]:
    """Combine the own parameters of each module; buffers have no gradient and are left out."""
    gradients = names_of([gradients_of_parameters(owner) for owner in owners], maps.info, maps.expansions)
    values = names_of([norms_of_parameters(owner) for owner in owners], maps.info, maps.expansions)
    norms = {_key(maps.info[name]): float(maps.stats[name].l2) for name in values}
    by_path: dict[str, list[str]] = {}
    for name in gradients:
        by_path.setdefault(maps.info[name].path, []).append(name)
    return {
        path: _Parameters(
            f"{names[0].rpartition('/param_grad(')[0]}/param(*)",
            _tensor(maps, names),
            math.hypot(*(norms.get(_key(maps.info[name]), math.nan) for name in names)),
            maps.info[names[0]].type,
        )
        for path, names in by_path.items()
    }


def _key(info: FeatureMapInfo) -> tuple[str, str]:
    """Return the key shared by a parameter and its gradient."""
    return info.path, info.port.partition("(")[2]


def _tensor(maps: FeatureMaps, names: Sequence[str]) -> _Tensor:
    """Merge statistics as if the tensors were one."""
    statistics = [maps.stats[name] for name in names]
    sizes = [math.prod(maps.info[name].shape) for name in names]
    return _Tensor(
        _norm(statistics),
        _zero_fraction(statistics, sizes),
        sum(int(entry.nan_count) for entry in statistics),
        sum(int(entry.inf_count) for entry in statistics),
    )


def _norm(statistics: Sequence[Statistics]) -> float:
    """Return the norm over all; NaN if one is NaN, unlike `math.hypot` beside an infinity."""
    norms = [float(entry.l2) for entry in statistics]
    return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)


def _zero_fraction(statistics: Sequence[Statistics], sizes: Sequence[int]) -> float:
    count = sum(sizes)
    zeros = sum(
        float(entry.zero_fraction) * size for entry, size in zip(statistics, sizes, strict=True) if size
    )
    return zeros / count if count else math.nan


def _name(info: FeatureMapInfo) -> str:
    """Return the selector of the value whose gradient was taken; an alias as it is."""
    named = _OF_A_GRADIENT.fullmatch(info.name)
    if named is None:
        return info.name
    before, port, after = named.groups()
    return f"{before}{after}" if before and port == "out" else f"{before}/{port}{after}"


def _row(
    name: str,
    path: str,
    kind: str,
    at: _Tensor | None,
    own: _Parameters | None,
    thresholds: HealthThresholds,
) -> HealthRow:
    of_parameters = None if own is None else own.gradient
    gradients = [tensor for tensor in (at, of_parameters) if tensor is not None]
    return HealthRow(
        name=name,
        path=path,
        type=kind,
        gradient_norm=None if at is None else at.norm,
        zero_fraction=None if at is None else at.zero_fraction,
        nan_count=sum(tensor.nan_count for tensor in gradients),
        inf_count=sum(tensor.inf_count for tensor in gradients),
        parameter_gradient_norm=None if own is None else own.gradient.norm,
        weight_norm=None if own is None else own.weight_norm,
        ratio=None if own is None else own.ratio,
        flags=_flags(gradients, own, thresholds),
    )


def _flags(
    gradients: Sequence[_Tensor], own: _Parameters | None, thresholds: HealthThresholds
) -> tuple[Flag, ...]:
    filled = [tensor for tensor in gradients if not math.isnan(tensor.zero_fraction)]
    alive = [tensor.norm for tensor in filled if not tensor.is_dead]
    ratio = own.ratio if own is not None and own.gradient in filled and not own.gradient.is_dead else None
    ratios = [] if ratio is None else [ratio]
    result: Mapping[Flag, bool] = {
        "nan": any(tensor.nan_count for tensor in gradients),
        "inf": any(tensor.inf_count for tensor in gradients),
        "exploding": any(norm > thresholds.exploding for norm in alive)
        or any(value > thresholds.exploding_ratio for value in ratios),
        "dead": any(tensor.is_dead for tensor in filled),
        "vanishing": any(norm < thresholds.vanishing for norm in alive)
        or any(value < thresholds.vanishing_ratio for value in ratios),
    }
    return tuple(flag for flag in FLAGS if result[flag])


def _place(path: str, rows: Sequence[HealthRow]) -> int:
    """Return the position of a module that is never called: before the first one that contains it."""
    for place, row in enumerate(rows):
        if row.path != path and (not row.path or path.startswith(f"{row.path}.")):
            return place
    return len(rows)
