"""Figures that a notebook shows as pictures, without pyplot."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trocar._base.figures import Figure, save_figure

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


def drawn() -> Figure:
    figure = Figure(figsize=(3, 2), dpi=50)
    figure.subplots().plot([1, 2])
    return figure


@pytest.mark.parametrize("name", ["a.png", "a.PNG", "a.svg", "a.pdf", "a.jpg", "a", "a.", "a.b.png"])
def test_a_picture_has_the_name_and_the_bytes_that_matplotlib_gives_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    save_figure(drawn(), tmp_path / "ours" / name, dpi=40)
    drawn().savefig(tmp_path / "theirs" / name, dpi=40)
    (ours,), (theirs,) = ((tmp_path / side).iterdir() for side in ("ours", "theirs"))
    assert ours.name == theirs.name
    assert ours.read_bytes()[:8] == theirs.read_bytes()[:8]
    if ours.suffix.lower() in (".png", ".jpg"):
        with Image.open(ours) as one, Image.open(theirs) as other:
            assert np.array_equal(np.asarray(one), np.asarray(other))


def test_a_picture_that_cannot_be_drawn_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    path.chmod(0o640)
    figure = drawn()
    figure.axes[0].set_title("$\\frac{$")  # no formula
    with pytest.raises(ValueError, match="frac"):
        save_figure(figure, path)
    with pytest.raises(ValueError, match="wrong"):
        save_figure(drawn(), tmp_path / "a.wrong")
    assert [(found.name, found.read_bytes()) for found in tmp_path.iterdir()] == [("a.png", b"old")]
    save_figure(drawn(), str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_mode & 0o777 == 0o640
