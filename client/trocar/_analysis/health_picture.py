"""The picture of a health report; needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from trocar._analysis.pictures import name_ticks
from trocar._tensors import Array

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
_MOST_NAMES = 160
"""Rows up to which the axis names every one."""
_INCHES_PER_ROW = 0.19
_MOST_INCHES = 32


def draw_health(health: Health) -> Figure:
    """Draw norms, and ratios below them; see `Health.plot`."""
    rows = health.rows
    width = max(7.0, min(_INCHES_PER_ROW * len(rows) + 2, _MOST_INCHES))
    figure = Figure(figsize=(width, 7.5), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    limits = health.thresholds
    norms = _numbers([row.gradient_norm for row in rows])
    of_weights = _numbers([row.parameter_gradient_norm for row in rows])
    ratios = _numbers([row.ratio for row in rows])
    _draw(upper, rows, [("o", norms), ("+", of_weights)], (limits.vanishing, limits.exploding))
    _draw(lower, rows, [("o", ratios)], (limits.vanishing_ratio, limits.exploding_ratio))
    upper.set_ylabel("norm of the gradient\no at the output, + of the parameters")
    lower.set_ylabel("norm of the parameters' gradient\n/ norm of the parameters")
    _name_flags(upper, rows)
    name_ticks(lower, [row.name for row in rows], "x", most=_MOST_NAMES)
    _colour_names(lower, rows)
    lower.set_xlim(-0.8, max(len(rows), 1) - 0.2)
    figure.suptitle(f"{health.model_id}: {health.summary}".removeprefix(": "), fontsize=10)
    return figure


def _numbers(values: Sequence[float | None]) -> Array:
    """Return NaN for what is not there, infinity for what is there and has no number."""
    return np.array([np.nan if v is None else np.inf if np.isnan(v) else v for v in values], np.float64)


def _draw(
    axes: Axes, rows: Sequence[HealthRow], series: Sequence[tuple[str, Array]], limits: tuple[float, float]
) -> None:
    """Draw numbers on a logarithmic axis; zeros at its foot, what is not finite at its head."""
    marks = np.concatenate([values for _, values in series])
    marks = marks[np.isfinite(marks) & (marks > 0)]
    lowest, highest = (float(marks.min()), float(marks.max())) if marks.size else (1e-3, 1.0)
    foot, head = lowest / 10, highest * 10
    axes.set_yscale("log")
    axes.set_ylim(foot / 2, head * 2)
    places, colors = np.arange(len(rows)), np.array([_color(row) for row in rows])
    for marker, values in series:
        heights = np.where(np.isinf(values), head, np.maximum(values, foot))
        there = ~np.isnan(values)
        if marker == "o":
            axes.plot(places[there], heights[there], color="#bbbbbb", linewidth=0.8, zorder=1)
        for kind, chosen in ((marker, there & np.isfinite(values)), ("x", np.isinf(values))):
            if chosen.any():
                axes.scatter(places[chosen], heights[chosen], s=22, marker=kind, c=colors[chosen], zorder=2)
    for limit in limits:
        if foot / 2 < limit < head * 2:
            axes.axhline(limit, color="grey", linestyle="--", linewidth=0.8)
    axes.grid(axis="x", color="#eeeeee", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)


def _color(row: HealthRow) -> str:
    return _COLORS[row.flags[0] if row.flags else ""]


def _name_flags(axes: Axes, rows: Sequence[HealthRow]) -> None:
    """Explain the colours that are there."""
    there = {row.flags[0] if row.flags else "" for row in rows}
    for flag, color in _COLORS.items():
        if flag in there:
            axes.scatter([], [], s=22, color=color, label=flag or "healthy")
    if there:
        axes.legend(fontsize=8, loc="best")


def _colour_names(axes: Axes, rows: Sequence[HealthRow]) -> None:
    for place, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
        row = rows[round(float(place))]
        if row.flags:
            label.set_color(_color(row))
