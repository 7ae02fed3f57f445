"""History plot of a fit; needs matplotlib."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trocar._base.figures import Figure
from trocar._result.history import numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trocar._result.history import History


def draw(history: History) -> Figure:
    """Draw the loss of the steps and of evaluations, and on an axis of their own the metrics."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = history.of_kind("step")
    axes.plot([event["step"] for event in steps], history.losses, linewidth=0.8, label="loss of a step")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    if all(loss >= 0 for loss in history.losses if not math.isnan(loss)):
        axes.set_ylim(bottom=0)
    _draw(axes, history, "loss", "loss, evaluation", "o-", "C1")
    _draw_metrics(axes, history)
    return figure


def _draw_metrics(axes: Axes, history: History) -> None:
    names = sorted({name for event in history.evaluations for name, _ in numbers(event)} - {"loss"})
    shown = [axes]
    if names:
        shown.append(axes.twinx())
        shown[-1].set_ylabel(", ".join(names))
    for position, name in enumerate(names):
        _draw(shown[-1], history, name, name, "s--", f"C{position + 2}")
    result = [axes.get_legend_handles_labels() for axes in shown]
    lines, labels = ([entry for part in parts for entry in part] for parts in zip(*result, strict=True))
    axes.figure.legend(lines, labels, loc="outside upper center", ncols=len(labels), frameon=False)


def _draw(axes: Axes, history: History, name: str, label: str, style: str, color: str) -> None:
    """Draw one metric of the evaluations."""
    told = [(event["step"], dict(numbers(event)).get(name)) for event in history.evaluations]
    points = [(step, value) for step, value in told if value is not None]
    if points:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, style, color=color, markersize=4, label=label)
