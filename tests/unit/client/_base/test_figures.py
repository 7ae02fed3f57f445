"""Figures that a notebook shows as pictures, without pyplot."""

import io
import subprocess
import sys

import numpy as np
from PIL import Image

from trocar._base.figures import Figure

SHOWN_ALONE = """
import sys
from trocar._base.figures import Figure
Figure()._repr_png_()
print("matplotlib.pyplot" in sys.modules)
"""


def test_a_figure_shows_itself_as_a_picture() -> None:
    figure = Figure(figsize=(3, 2), dpi=50)
    figure.subplots().plot([1, 2])
    with Image.open(io.BytesIO(figure._repr_png_())) as picture:
        assert (picture.format, picture.size) == ("PNG", (150, 100))
        assert np.asarray(picture.convert("L")).min() < 100


def test_no_picture_needs_pyplot() -> None:
    done = subprocess.run([sys.executable, "-c", SHOWN_ALONE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
