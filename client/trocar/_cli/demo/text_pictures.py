"""Text demo pictures: a matrix of similarities, and sentences whose tokens are coloured by what they add."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trocar._base.tensors import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BACKGROUND, _TEXT, _DARK = "#14161b", "#eceff4", "#14161b"
_MAP = "magma"
_BRIGHT = 0.6
"""From this share of the scale on, dark letters are readable."""
_CHARACTER, _GAP, _ROW = 0.105, 0.12, 0.52
"""Inches: a character's width, the space between tokens, the height of a row."""


def draw_similarities(sentences: Sequence[str], similarities: Array) -> "Figure":
    """Draw the cosines of sentences, (sentences, sentences), with their numbers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.0), dpi=110, layout="constrained")
    figure.set_facecolor(_BACKGROUND)
    axes = figure.subplots()
    axes.imshow(similarities, cmap=_MAP, vmin=0, vmax=1)
    count = len(sentences)
    labels = [f"{sentence}  {number}" for number, sentence in enumerate(sentences, 1)]
    axes.set_yticks(range(count), labels, color=_TEXT, fontsize=10)
    axes.set_xticks(range(count), [str(number) for number in range(1, count + 1)], color=_TEXT, fontsize=10)
    axes.tick_params(length=0)
    axes.set_title("cosine between sentence vectors", color=_TEXT, fontsize=11)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for row in range(count):
        for column in range(count):
            number = float(similarities[row, column])
            colour = _DARK if number > _BRIGHT else _TEXT
            axes.text(
                column,
                row,
                f"{number:.2f}".replace("-0.00", "0.00"),
                color=colour,
                ha="center",
                va="center",
                fontsize=10,
            )
    return figure


def draw_tokens(tokens: Sequence[Sequence[str]], values: Sequence[Array]) -> "Figure":
    """Draw a row for each sentence: its tokens, brighter the more they add.

    Args:
        tokens: Of each sentence.
        values: A number for each token, (tokens,) for each sentence.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    width = max(sum(_width(token) + _GAP for token in row) for row in tokens) + _GAP
    height = _ROW * (len(tokens) + 1)
    figure = Figure(figsize=(width, height), dpi=110)
    figure.set_facecolor(_BACKGROUND)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.text(
        _GAP,
        _ROW / 2,
        "what each token adds to the cosine with the nearest sentence",
        color=_TEXT,
        va="center",
    )
    most = max(float(row.max()) for row in values)
    for line, (row, numbers) in enumerate(zip(tokens, values, strict=True), 1):
        left = _GAP
        for token, number in zip(row, numbers, strict=True):
            share = max(float(number), 0.0) / most
            text: dict[str, Any] = {
                "color": _DARK if share > _BRIGHT else _TEXT,
                "fontsize": 10,
                "family": "monospace",
            }
            box = {"facecolor": colormaps[_MAP](share), "edgecolor": "none", "boxstyle": "square,pad=0.25"}
            centre = left + _width(token) / 2
            axes.text(centre, _ROW * (line + 0.5), token, ha="center", va="center", bbox=box, **text)
            left += _width(token) + _GAP
    return figure


def _width(token: str) -> float:
    return _CHARACTER * (len(token) + 1)
