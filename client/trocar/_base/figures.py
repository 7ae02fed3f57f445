"""Figures that a notebook shows as pictures; needs matplotlib."""

import io

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
