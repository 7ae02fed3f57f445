"""Health report plot; needs matplotlib."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

import numpy as np

from trocar._analysis.health import FLAGS
from trocar._analysis.pictures import name_rows, shown_rows
from trocar._base.figures import Figure
from trocar._base.tensors import Array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from trocar._analysis.health import Health, HealthRow

_COLORS = {
    "": "#2c6fbb",
    "nan": "#c0392b",
    "inf": "#d35400",
    "exploding": "#f39c12",
    "dead": "#2c3e50",
    "vanishing": "#8e44ad",
}
"""By the worst flag of a row; "" is healthy."""
_TITLE_CHARACTERS = 110


def draw_health(health: Health, *, all_rows: bool) -> Figure:
    """Draw norms, and ratios beside them; see `Health.plot`."""
    shown = shown_rows(health.rows, _telling, "flagged ones first, then by largest norm", all_rows=all_rows)
    rows, limits = shown.rows, health.thresholds
    figure = Figure(figsize=(10, shown.inches), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    norms = _numbers([row.gradient_norm for row in rows])
    of_weights = _numbers([row.parameter_gradient_norm for row in rows])
    ratios = _numbers([row.ratio for row in rows])
    is_sorted = bool(shown.note)
    _draw(left, rows, [("o", norms), ("+", of_weights)], (limits.vanishing, limits.exploding), is_sorted)
    _draw(right, rows, [("o", ratios)], (limits.vanishing_ratio, limits.exploding_ratio), is_sorted)
    left.set_xlabel("norm of the gradient\no at the output, + of the parameters")
    right.set_xlabel("norm of the parameters' gradient\n/ norm of the parameters")
    name_rows(left, [row.name for row in rows])
    _name_flags(left, rows)
    _colour_names(left, rows)
    summary = f"{health.model_id}: {health.summary}".removeprefix(": ")
    figure.suptitle(shown.titled(*textwrap.wrap(summary, _TITLE_CHARACTERS)), fontsize=10)
    return figure


def _telling(row: HealthRow) -> tuple[int, float]:
    """Return the key by which rows are chosen: the worst flags first, then the largest norms."""
    worst = -FLAGS.index(row.flags[0]) if row.flags else -len(FLAGS)
    norms = (row.gradient_norm, row.parameter_gradient_norm)
    known = [norm for norm in norms if norm is not None and not math.isnan(norm)]
    return worst, max(known, default=0.0)


def _numbers(values: Sequence[float | None]) -> Array:
    """Return NaN for a missing number, infinity for a non-finite one."""
    return np.array([np.nan if v is None else np.inf if np.isnan(v) else v for v in values], np.float64)


def _draw(
    axes: Axes,
    rows: Sequence[HealthRow],
    series: Sequence[tuple[str, Array]],
    limits: tuple[float, float],
    is_sorted: bool,
) -> None:
    """Draw numbers on a logarithmic axis; zeros at the left, non-finite ones at the right."""
    marks = np.concatenate([values for _, values in series])
    marks = marks[np.isfinite(marks) & (marks > 0)]
    lowest, highest = (float(marks.min()), float(marks.max())) if marks.size else (1e-3, 1.0)
    foot, head = lowest / 10, highest * 10
    axes.set_xscale("log")
    axes.set_xlim(foot / 2, head * 2)
    places, colors = np.arange(len(rows)), np.array([_color(row) for row in rows])
    for marker, values in series:
        lengths = np.where(np.isinf(values), head, np.maximum(values, foot))
        present = ~np.isnan(values)
        if marker == "o" and not is_sorted:  # a line only where neighbours follow each other in the pass
            axes.plot(lengths[present], places[present], color="#bbbbbb", linewidth=0.8, zorder=1)
        for kind, chosen in ((marker, present & np.isfinite(values)), ("x", np.isinf(values))):
            if chosen.any():
                axes.scatter(lengths[chosen], places[chosen], s=22, marker=kind, c=colors[chosen], zorder=2)
    for limit in limits:
        if foot / 2 < limit < head * 2:
            axes.axvline(limit, color="grey", linestyle="--", linewidth=0.8)
    axes.grid(axis="y", color="#eeeeee", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)


def _color(row: HealthRow) -> str:
    return _COLORS[row.flags[0] if row.flags else ""]


def _name_flags(axes: Axes, rows: Sequence[HealthRow]) -> None:
    """Explain the colours in use."""
    present = {row.flags[0] if row.flags else "" for row in rows}
    for flag, color in _COLORS.items():
        if flag in present:
            axes.scatter([], [], s=22, color=color, label=flag or "healthy")
    if present:
        axes.legend(fontsize=8, loc="best")


def _colour_names(axes: Axes, rows: Sequence[HealthRow]) -> None:
    for place, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True):
        row = rows[round(float(place))]
        if row.flags:
            label.set_color(_color(row))
