"""Plots of analysis results; needs matplotlib."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from trocar._base.figures import Figure, save_figure
from trocar._base.tensors import Array

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes

    from trocar._analysis.comparison import ClassChange, Comparison, Side
    from trocar._analysis.dead_channels import DeadChannels, DeadRow
    from trocar._analysis.diff import Diff, DiffRow
    from trocar._analysis.direction_scores import DirectionScores
    from trocar._analysis.pca import Pca

Row = TypeVar("Row")

_MOST_NUMBERS = 16
"""Rows or columns up to which a heat map has its values written in it."""
_MOST_NAMES = 60
"""Feature maps up to which an axis names every one."""
MOST_ROWS = 30
"""Rows of a report up to which a picture shows all of them."""
_MOST_RDMS = 12
_INCHES_PER_ROW = 0.2
_MOST_INCHES = 500
_MOST_CHARACTERS = 56
"""Of the name of a row."""
_BAD, _GOOD = "#c0392b", "#2c6fbb"


@dataclass(frozen=True)
class ShownRows(Generic[Row]):
    """Rows of a report that a picture shows."""

    rows: tuple[Row, ...]
    """All of them in execution order, or the most telling ones, the foremost first."""
    note: str
    """A line of the title; empty where all are shown."""

    @property
    def inches(self) -> float:
        """Height of a figure with a place for each row."""
        return min(1.8 + _INCHES_PER_ROW * max(len(self.rows), 6), _MOST_INCHES)

    def titled(self, *lines: str) -> str:
        """Return a title of these lines and the note."""
        return "\n".join(line.replace("$", r"\$") for line in (*lines, self.note) if line)


def shown_rows(
    rows: Sequence[Row], key: Callable[[Row], Any], order: str, *, all_rows: bool
) -> ShownRows[Row]:
    """Choose what a picture shows of many rows.

    Args:
        rows: All rows, in execution order.
        key: Larger for rows that tell more.
        order: What `key` is, for the title: "sorted by relative error".
        all_rows: Whether all are wanted, however many.
    """
    if all_rows or len(rows) <= MOST_ROWS:
        return ShownRows(tuple(rows), "")
    chosen = sorted(rows, key=key, reverse=True)[:MOST_ROWS]
    return ShownRows(tuple(chosen), f"{MOST_ROWS} of {len(rows)} modules, {order}")


def saved(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    """Return the figure, saved if there is a path."""
    if path is not None:
        save_figure(figure, path, dpi=120)
    return figure


class NamedMatrix(Protocol):
    """A matrix between feature maps of one or two models: `Cka`, `Rsa`."""

    @property
    def matrix(self) -> Array:
        """At most 1, of shape (rows, columns)."""
        ...

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the rows."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        ...

    @property
    def model_id(self) -> str:
        """The model of the rows."""
        ...

    @property
    def other(self) -> str:
        """The model of the columns."""
        ...

    @property
    def title(self) -> str:
        """What it is, in a line."""
        ...


def draw_matrix(named: NamedMatrix) -> Figure:
    """Draw the matrix as a heat map; see `Cka.plot`."""
    height, width = named.matrix.shape
    figure = Figure(figsize=(3 + 0.5 * min(width, 40), 2.2 + 0.45 * min(height, 40)), layout="constrained")
    axes = figure.subplots()
    low = min(0.0, float(np.nanmin(named.matrix, initial=0.0)))
    image = axes.imshow(named.matrix, cmap="viridis", vmin=low, vmax=1.0, interpolation="nearest")
    name_ticks(axes, named.rows, "y")
    name_ticks(axes, named.columns, "x")
    axes.set_ylabel(named.model_id)
    axes.set_xlabel(named.other)
    if max(height, width) <= _MOST_NUMBERS:
        _write_values(axes, named.matrix, middle=(1 + low) / 2)
    figure.colorbar(image, shrink=0.8)
    figure.suptitle(named.title)
    return figure


def draw_rdms(rdms: Mapping[str, Array], title: str) -> Figure:
    """Draw the dissimilarities of all samples, a panel for each feature map; see `Rsa.plot`."""
    shown = list(rdms.items())[:_MOST_RDMS]
    columns = math.ceil(math.sqrt(len(shown)))
    lines = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(3 * columns + 0.5, 2.8 * lines + 0.6), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
    for axes, (name, rdm) in zip(panels.flat, shown, strict=False):
        image = axes.imshow(rdm, cmap="viridis", interpolation="nearest")
        axes.set_title(_short(name, _MOST_CHARACTERS), fontsize=8)
        figure.colorbar(image, ax=axes, shrink=0.7)
    figure.suptitle(title.replace("$", r"\$"), fontsize=9)
    return figure


def draw_diff(diff: Diff, *, all_rows: bool) -> Figure:
    """Draw relative error and cosine over the feature maps; see `Diff.plot`."""
    shown = _shown_differences(diff, all_rows=all_rows)
    figure = Figure(figsize=(9, shown.inches), layout="constrained")
    _draw_differences(figure.subplots(1, 2, sharey=True, width_ratios=(2, 1)), shown, diff)
    figure.suptitle(shown.titled(f"{diff.model_a} and {diff.model_b}", diff.verdict), fontsize=10)
    return figure


def draw_comparison(result: Comparison, *, all_rows: bool) -> Figure:
    """Draw the differences, and the scores of the best classes on both sides; see `Comparison.plot`."""
    diff, classes = result.diff, result.classes[:_MOST_NUMBERS]
    shown = _shown_differences(diff, all_rows=all_rows)
    heights = [shown.inches, 1 + 0.5 * len(classes)][: 2 if classes else 1]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    places = figure.subfigures(len(heights), height_ratios=heights, squeeze=False)
    _draw_differences(places[0, 0].subplots(1, 2, sharey=True, width_ratios=(2, 1)), shown, diff)
    if classes:
        _draw_classes(places[1, 0].subplots(), classes, result.sides)
    figure.suptitle(shown.titled(f"{diff.model_a} and {diff.model_b}", result.verdict), fontsize=10)
    return figure


def _shown_differences(diff: Diff, *, all_rows: bool) -> ShownRows[DiffRow]:
    def error(row: DiffRow) -> float:
        return math.inf if math.isnan(row.relative_error) else row.relative_error

    return shown_rows(diff.rows, error, "sorted by relative error", all_rows=all_rows)


def _draw_classes(axes: Axes, shown: Sequence[ClassChange], sides: tuple[Side, Side]) -> None:
    """Draw for each sample the score, on both sides, of the class that is the best on the first."""
    first, second = sides
    places = np.arange(len(shown))
    for offset, scores, color, label in (
        (-0.2, [one.before.score for one in shown], _GOOD, first.name),
        (0.2, [one.before_score_after for one in shown], _BAD, second.name),
    ):
        axes.barh(places + offset, scores, height=0.38, color=color, label=label)
    names = [f"{_short(one.sample, 24)}: {_short(one.before.label, 24)}" for one in shown]
    axes.set_yticks(places, names, fontsize=7)
    for place, one in zip(places, shown, strict=True):
        if one.is_changed:
            text = f"{second.name}: {_short(one.after.label, 24)} {one.after.score:.3g}"
            axes.annotate(text, (1, place), xycoords=("axes fraction", "data"), ha="right", fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"score of the class that is the best {first.phrase}")
    axes.legend(fontsize=8, loc="best")


def _draw_differences(panels: Sequence[Axes], shown: ShownRows[DiffRow], diff: Diff) -> None:
    left, right = panels
    rows, places = shown.rows, np.arange(len(shown.rows))
    _draw_errors(left, places, rows, diff)
    cosines = [row.cosine for row in rows]
    right.plot(cosines, places, "." if shown.note else ".-", color=_GOOD, linewidth=0.8)
    right.set_xlabel("cosine")
    right.ticklabel_format(axis="x", useOffset=False)
    right.locator_params(axis="x", nbins=4)
    if not np.isfinite(cosines).any():
        right.set_xlim(-1, 1)
    name_rows(left, [row.name for row in rows])
    first = diff.first_diverging
    if first is not None and first in rows:
        for axes in panels:
            axes.axhline(rows.index(first), color=_BAD, linewidth=1, alpha=0.5)


def draw_dead(report: DeadChannels, *, all_rows: bool) -> Figure:
    """Draw the shares of dead channels as bars; see `DeadChannels.plot`."""
    shown = shown_rows(
        report.rows,
        lambda row: (row.share + _nan_share(row), row.channels),
        "sorted by share of dead channels",
        all_rows=all_rows,
    )
    figure = Figure(figsize=(8, shown.inches), layout="constrained")
    axes = figure.subplots()
    shares = [100 * row.share for row in shown.rows]
    nan = [100 * _nan_share(row) for row in shown.rows]
    axes.barh(range(len(shares)), shares, color=_GOOD, label="dead")
    if any(nan):
        axes.barh(range(len(nan)), nan, left=shares, color=_BAD, label="with NaN")
        axes.legend()
    axes.set_xlabel("channels, %")
    axes.set_xlim(0, 1.1 * max([1.0, *(share + part for share, part in zip(shares, nan, strict=True))]))
    name_rows(axes, [row.name for row in shown.rows])
    total = f"{report.dead_count:,} of {report.channel_count:,} channels are dead"
    figure.suptitle(shown.titled(f"{report.model_id}: {total}"), fontsize=10)
    return figure


def _nan_share(row: DeadRow) -> float:
    return len(row.nan) / row.channels if row.channels else 0.0


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
    axes.locator_params(axis="x", integer=True)
    axes.legend()
    figure.suptitle(f"{pca.model_id} {pca.at}: {len(shares)} of {pca.mean.size} components".strip())
    return figure


def _draw_errors(axes: Axes, places: Array, rows: Sequence[DiffRow], diff: Diff) -> None:
    """Draw relative errors on a logarithmic axis; zeros at the left, incomparable ones at the right."""
    errors = np.array([row.relative_error for row in rows], np.float64)
    shown = errors[np.isfinite(errors) & (errors > 0)]
    marks = [value for value in (diff.tolerance, *shown.tolist()) if 0 < value < np.inf] or [1.0]
    foot, head = min(marks) / 10, max(marks) * 10
    lengths = np.where(np.isfinite(errors), np.maximum(errors, foot), head)
    is_bad = np.array([row.diverges(diff.tolerance) for row in rows], bool)
    axes.set_xscale("log")
    axes.set_xlim(foot, head * 1.5)
    axes.hlines(places, foot, lengths, color=np.where(is_bad, _BAD, _GOOD), linewidth=1)
    kinds = (
        ("within", ~is_bad, "o", _GOOD),
        ("above the tolerance", is_bad & np.isfinite(errors), "o", _BAD),
        ("not comparable", ~np.isfinite(errors), "x", _BAD),
    )
    for label, chosen, marker, color in kinds:
        if chosen.any():
            axes.scatter(lengths[chosen], places[chosen], s=18, marker=marker, color=color, label=label)
    if 0 < diff.tolerance < np.inf:
        axes.axvline(diff.tolerance, color="grey", linestyle="--", linewidth=0.8, label="tolerance")
    axes.set_xlabel("relative error (0 at the left)" if (errors == 0).any() else "relative error")
    axes.legend(fontsize=8, loc="best")


def draw_directions(scores: DirectionScores) -> Figure:
    """Draw the score of each place as a line, with the range of its folds as a band."""
    rows = scores.rows
    figure = Figure(figsize=(max(6.0, 0.35 * len(rows)), 4.0), layout="constrained")
    axes = figure.subplots()
    places = list(range(len(rows)))
    values = [np.nan if row.score is None else row.score for row in rows]
    axes.plot(places, values, marker="o", color=_GOOD, label=rows[0].score_name or "score")
    low = [min(row.fold_scores, default=value) for row, value in zip(rows, values, strict=True)]
    high = [max(row.fold_scores, default=value) for row, value in zip(rows, values, strict=True)]
    axes.fill_between(places, low, high, alpha=0.2, color=_GOOD, linewidth=0)
    name_ticks(axes, [row.place for row in rows], "x")
    axes.set_ylabel(rows[0].score_name or "score")
    axes.set_title(scores.name.replace("$", r"\$"))
    return figure


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name every row on the y axis, from top to bottom."""
    most = int(_MOST_INCHES / _INCHES_PER_ROW)
    name_ticks(axes, names, "y", most=most, characters=_MOST_CHARACTERS)
    axes.set_ylim(max(len(names), 1) - 0.2, -0.8)


def name_ticks(
    axes: Axes, names: Sequence[str], side: str, *, most: int = _MOST_NAMES, characters: int = 36
) -> None:
    """Name every feature map, or every n-th of more than `most`."""
    step = -(-len(names) // most) or 1
    places = range(0, len(names), step)
    labels = [_short(names[place], characters) for place in places]
    if side == "x":
        axes.set_xticks(list(places), labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=7)
    else:
        axes.set_yticks(list(places), labels, fontsize=7)


def _short(name: str, most: int) -> str:
    name = name.replace("$", r"\$")  # no mathematics
    return name if len(name) <= most else f"...{name[3 - most :]}"


def _write_values(axes: Axes, matrix: Array, middle: float) -> None:
    for row, line in enumerate(matrix):
        for column, value in enumerate(line):
            color = "black" if value > middle else "white"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize=7)
