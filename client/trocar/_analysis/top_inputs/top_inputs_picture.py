"""Picture of the inputs that drive channels; needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.patches import Rectangle

from trocar._analysis.sample_inputs import box_in, crop_of, draw_text, sample_image, sample_text
from trocar._base.figures import Figure
from trocar._base.names import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trocar._analysis.sample_inputs import SampleImage
    from trocar._analysis.top_inputs.places import Place
    from trocar._analysis.top_inputs.top_inputs import TopInput, TopInputs

_MOST_CHANNELS, _MOST_COLUMNS = 16, 24
_TITLE = 20
"""Characters of a panel's title."""
_FRAME = "#e74c3c"


def draw_top_inputs(
    top: TopInputs, rows: Sequence[Sequence[TopInput]], *, widen: float, is_whole: bool
) -> Figure:
    """Draw a row for each channel; see `TopInputs.plot`. One channel alone becomes a square of panels."""
    shown = rows[:_MOST_CHANNELS]
    lines = _square(shown[0]) if len(shown) == 1 else [row[:_MOST_COLUMNS] for row in shown]
    columns = max(map(len, lines), default=1)
    figure = Figure(figsize=(1.7 * columns + 0.6, 2.0 * max(len(lines), 1) + 0.7), layout="constrained")
    panels = figure.subplots(max(len(lines), 1), max(columns, 1), squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
    for line, entries in enumerate(lines):
        for axes, one in zip(panels[line], entries, strict=False):
            _draw(axes, top, one, widen, is_whole=is_whole)
        if len(shown) > 1 and entries:
            label = f"channel {entries[0].channel}"
            panels[line, 0].text(-0.06, 0.5, label, rotation=90, va="center", ha="right", fontsize=8,
                                 transform=panels[line, 0].transAxes)  # fmt: skip
    figure.suptitle(_plain(_title(top, rows, shown)), fontsize=9)
    return figure


def _title(top: TopInputs, rows: Sequence[Sequence[TopInput]], shown: Sequence[Sequence[TopInput]]) -> str:
    if len(rows) == 1 and rows[0]:
        return f"channel {rows[0][0].channel}: {top.title}"
    return top.title if len(shown) == len(rows) else f"{top.title}\nthe first {len(shown)} channels"


def _square(entries: Sequence[TopInput]) -> list[Sequence[TopInput]]:
    columns = max(1, round(len(entries) ** 0.5 + 0.499))
    return [entries[start : start + columns] for start in range(0, len(entries), columns)]


def _draw(axes: Axes, top: TopInputs, one: TopInput, widen: float, *, is_whole: bool) -> None:
    value, place = top.sources.samples.get(one.index), one.place
    image = None if value is None else sample_image(value, top.sources.preprocessing)
    axes.set_title(_plain(f"{one.value:.4g}\n{_end(one.key)}"), fontsize=7)
    if image is None:
        marked = _marked(place) if place is not None else ""
        draw_text(axes, marked or sample_text(value) or one.key)
    elif place is None or place.cell is None or is_whole:
        axes.imshow(image.pixels, cmap="gray", vmin=0, vmax=1)
        if place is not None and place.cell is not None:
            _frame(axes, image, place.cell.box(widen))
    else:
        axes.imshow(crop_of(image, place.cell.box(widen)), cmap="gray", vmin=0, vmax=1)


def _frame(axes: Axes, image: SampleImage, share: tuple[float, float, float, float]) -> None:
    left, right, top, bottom = box_in(image, share)
    axes.add_patch(
        Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=_FRAME, linewidth=1.2)
    )


def _marked(place: Place) -> str:
    """Return the token in brackets, between those around it; empty of what is no token."""
    if not place.token:
        return ""
    return " ".join([*place.before, f"[{place.token}]", *place.after])


def _end(name: str) -> str:
    return shortened(os.path.basename(name) or name, _TITLE)  # noqa: PTH119 - may be a text


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # no mathematics
