"""A picture of a fit; needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trocar._history import numbers

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError('plots need matplotlib: pip install "trocar[plot]"') from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trocar._history import History


def draw(history: History) -> Figure:
    """Draw the loss of the steps and of evaluations, and on an axis of their own the metrics."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = history.of_kind("step")
    axes.plot([event["step"] for event in steps], history.losses, linewidth=0.8, label="loss of a step")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    found = [event for event in history.evaluations if event.get("loss") is not None]
    if found:
        axes.plot([e["step"] for e in found], [e["loss"] for e in found], "o-", label="loss, evaluation")
    _draw_metrics(axes, history)
    return figure


def _draw_metrics(axes: Axes, history: History) -> None:
    names = sorted({name for event in history.evaluations for name, _ in numbers(event)})
    lines, labels = axes.get_legend_handles_labels()
    if names:
        other = axes.twinx()
        for position, name in enumerate(names):
            points = [
                (e["step"], dict(numbers(e))[name]) for e in history.evaluations if name in dict(numbers(e))
            ]
            xs, ys = zip(*points, strict=True)
            (line,) = other.plot(xs, ys, "s--", color=f"C{position + 2}", markersize=4)
            lines.append(line)
            labels.append(name)
        other.set_ylabel(", ".join(names))
    axes.figure.legend(lines, labels, loc="outside upper center", ncols=len(labels), frameon=False)
