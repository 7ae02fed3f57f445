"""Figures that a notebook shows as pictures; needs matplotlib."""

import io
import os
from pathlib import Path
from typing import Any

from trocar._base.replacement import write_file

try:
    from matplotlib.figure import Figure as _Figure
except ImportError as error:
    raise ImportError('plots need matplotlib: pip install "trocar[plot]"') from error


class Figure(_Figure):
    """A matplotlib figure that a notebook shows as its picture when a cell ends in it.

    Notebooks show plain figures only after pyplot has made one. These are made without pyplot, which would
    keep them in memory and may want a display.
    """

    def _repr_png_(self) -> bytes:
        """Show the picture in a notebook."""
        png = io.BytesIO()
        self.savefig(png, format="png")
        return png.getvalue()


def save_figure(figure: _Figure, path: str | os.PathLike[str], **options: Any) -> None:
    """Write a picture as `Figure.savefig` does, but never half of one.

    Args:
        figure: The figure.
        path: The file; the suffix sets the format, and one without a suffix gets matplotlib's default.
        **options: As for `savefig`.

    Raises:
        ValueError: matplotlib has no such format.
        OSError: The file cannot be written; an existing one is as it was.
    """
    target = Path(path)
    format = os.path.splitext(target)[1][1:]  # noqa: PTH122 - as matplotlib does
    if not format:
        format = figure.canvas.get_default_filetype()
        target = target.with_name(f"{target.name.rstrip('.')}.{format}")
    picture = io.BytesIO()
    figure.savefig(picture, format=format, **options)
    write_file(target, picture.getvalue())
