"""Pictures of results; needs matplotlib."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError('plots need matplotlib: pip install "trocar[plot]"') from error

from trocar._tensors import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trocar._analysis.cka import Cka
    from trocar._analysis.dead_channels import DeadChannels
    from trocar._analysis.diff import Diff
    from trocar._analysis.pca import Pca

_MOST_NUMBERS = 16
"""Rows or columns up to which a heat map has its values written in it."""
_MOST_NAMES = 60
"""Feature maps up to which an axis names every one."""
_BAD, _GOOD = "#c0392b", "#2c6fbb"


def saved(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    """Return the figure, saved where there is a path."""
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def draw_cka(cka: Cka) -> Figure:
    """Draw the matrix as a heat map; see `Cka.plot`."""
    height, width = cka.matrix.shape
    figure = Figure(figsize=(3 + 0.5 * min(width, 40), 2.2 + 0.45 * min(height, 40)), layout="constrained")
    axes = figure.subplots()
    low = min(0.0, float(np.nanmin(cka.matrix, initial=0.0)))
    image = axes.imshow(cka.matrix, cmap="viridis", vmin=low, vmax=1.0, interpolation="nearest")
    name_ticks(axes, cka.rows, "y")
    name_ticks(axes, cka.columns, "x")
    axes.set_ylabel(cka.model_id)
    axes.set_xlabel(cka.other)
    if max(height, width) <= _MOST_NUMBERS:
        _write_values(axes, cka.matrix, middle=(1 + low) / 2)
    figure.colorbar(image, shrink=0.8)
    figure.suptitle(cka.title)
    return figure


def draw_diff(diff: Diff) -> Figure:
    """Draw relative error and cosine over the feature maps; see `Diff.plot`."""
    rows = diff.rows
    figure = Figure(figsize=(max(6.0, min(0.2 * len(rows) + 2, 18)), 6.5), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    places = np.arange(len(rows))
    errors = np.array([row.relative_error for row in rows], np.float64)
    _draw_errors(upper, places, errors, diff)
    lower.plot(places, [row.cosine for row in rows], ".-", color=_GOOD, linewidth=0.8)
    lower.set_ylabel("cosine")
    lower.ticklabel_format(axis="y", useOffset=False)
    if not np.isfinite([row.cosine for row in rows]).any():
        lower.set_ylim(-1, 1)
    name_ticks(lower, [row.name for row in rows], "x")
    lower.set_xlim(-0.8, len(rows) - 0.2)
    first = diff.first_diverging
    if first is not None:
        for axes in (upper, lower):
            axes.axvline(rows.index(first), color=_BAD, linewidth=1, alpha=0.5)
    figure.suptitle(f"{diff.model_a} and {diff.model_b}\n{diff.verdict}", fontsize=10)
    return figure


def draw_dead(report: DeadChannels) -> Figure:
    """Draw the shares of dead channels as bars; see `DeadChannels.plot`."""
    rows = report.rows
    figure = Figure(figsize=(max(6.0, min(0.2 * len(rows) + 2, 18)), 4.5), layout="constrained")
    axes = figure.subplots()
    axes.bar(range(len(rows)), [100 * row.share for row in rows], color=_GOOD, label="dead")
    nan = [100 * len(row.nan) / row.channels if row.channels else 0.0 for row in rows]
    if any(nan):
        axes.bar(
            range(len(rows)), nan, bottom=[100 * row.share for row in rows], color=_BAD, label="with NaN"
        )
        axes.legend()
    axes.set_ylabel("channels, %")
    axes.set_ylim(0, 1.1 * max([1.0, *(100 * row.share + part for row, part in zip(rows, nan, strict=True))]))
    name_ticks(axes, [row.name for row in rows], "x")
    axes.set_xlim(-0.8, len(rows) - 0.2)
    figure.suptitle(f"{report.model_id}: {report.dead_count:,} of {report.channel_count:,} channels are dead")
    return figure


def draw_pca(pca: Pca) -> Figure:
    """Draw the share of the variance of each component and their sum; see `Pca.plot`."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    shares = 100 * pca.explained_variance_ratio
    axes.bar(range(len(shares)), shares, color=_GOOD, label="each")
    axes.plot(range(len(shares)), np.cumsum(shares), ".-", color=_BAD, label="sum")
    axes.set_xlabel("component")
    axes.set_ylabel("share of the variance, %")
    axes.set_ylim(0, 105)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    figure.suptitle(f"{pca.model_id} {pca.at}: {len(shares)} of {pca.mean.size} components".strip())
    return figure


def _draw_errors(axes: Axes, places: Array, errors: Array, diff: Diff) -> None:
    """Draw relative errors on a logarithmic axis; zeros at its foot, what is not comparable at its head."""
    shown = errors[np.isfinite(errors) & (errors > 0)]
    marks = [value for value in (diff.tolerance, *shown.tolist()) if 0 < value < np.inf] or [1.0]
    foot, head = min(marks) / 10, max(marks) * 10
    heights = np.where(np.isfinite(errors), np.maximum(errors, foot), head)
    is_bad = np.array([row.diverges(diff.tolerance) for row in diff.rows], bool)
    axes.set_yscale("log")
    axes.set_ylim(foot, head * 1.5)
    axes.vlines(places, foot, heights, color=np.where(is_bad, _BAD, _GOOD), linewidth=1)
    kinds = (
        ("within", ~is_bad, "o", _GOOD),
        ("above the tolerance", is_bad & np.isfinite(errors), "o", _BAD),
        ("not comparable", ~np.isfinite(errors), "x", _BAD),
    )
    for label, chosen, marker, color in kinds:
        if chosen.any():
            axes.scatter(places[chosen], heights[chosen], s=18, marker=marker, color=color, label=label)
    if 0 < diff.tolerance < np.inf:
        axes.axhline(diff.tolerance, color="grey", linestyle="--", linewidth=0.8, label="tolerance")
    axes.set_ylabel("relative error (0 at the foot)" if (errors == 0).any() else "relative error")
    axes.legend(fontsize=8, loc="best")


def name_ticks(axes: Axes, names: list[str] | tuple[str, ...], side: str, *, most: int = _MOST_NAMES) -> None:
    """Name every feature map, or every n-th of more than `most`."""
    step = -(-len(names) // most) or 1
    places = range(0, len(names), step)
    labels = [_short(names[place]) for place in places]
    if side == "x":
        axes.set_xticks(list(places), labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=7)
    else:
        axes.set_yticks(list(places), labels, fontsize=7)


def _short(name: str, most: int = 36) -> str:
    name = name.replace("$", r"\$")  # no mathematics
    return name if len(name) <= most else f"...{name[3 - most :]}"


def _write_values(axes: Axes, matrix: Array, middle: float) -> None:
    for row, line in enumerate(matrix):
        for column, value in enumerate(line):
            color = "black" if value > middle else "white"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize=7)
