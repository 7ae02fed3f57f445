"""Diff: distances between the feature maps of two models on the same inputs, and the first divergence."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trocar._base.names import unknown_name
from trocar._base.tables import html_table, number_text
from trocar._base.text_tables import text_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

_LISTED = 8
"""How many names a remark lists."""
_HEAD = ("feature map", "shape", "cosine", "relative error", "max difference", "not finite", "")


@dataclass(frozen=True)
class DiffRow:
    """One feature map of both models."""

    name: str
    """Its name in the first model."""
    name_b: str
    """Its name in the second model."""
    shape_a: tuple[int, ...]
    """Shape in the first model, in the first batch (or in the first where the shapes differ)."""
    shape_b: tuple[int, ...]
    """Shape in the second model."""
    cosine: float
    """Cosine of the angle between the two, -1 to 1; NaN where one is zero or they are not comparable."""
    relative_error: float
    """|a - b| / |a| with Euclidean norms; NaN where the shapes differ, infinite where only a is zero."""
    max_difference: float
    """Largest absolute difference of two elements."""
    nonfinite_a: int
    """NaN and infinities in the first model. Equal ones on both sides count as equal."""
    nonfinite_b: int
    """NaN and infinities in the second model."""
    mean_a: float = math.nan
    """Mean of the elements in the first model that are finite on both sides; NaN where the shapes differ."""
    mean_b: float = math.nan
    """Mean of the same elements in the second model."""

    @property
    def shapes_differ(self) -> bool:
        """Whether the two cannot be compared element by element."""
        return self.shape_a != self.shape_b

    def diverges(self, tolerance: float) -> bool:
        """Whether the shapes differ or the relative error is above the tolerance."""
        return not self.relative_error <= tolerance


@dataclass(frozen=True)
class Diff:
    """Two models compared, feature map by feature map; see `Client.diff`.

    diff = client.diff("resnet18", "resnet18-tuned", "photos/", taps="**")
    diff.first_diverging                 # the first row above the tolerance, or None
    print(diff)
    diff.plot("diff.png")
    """

    rows: tuple[DiffRow, ...]
    """In the execution order of the first model."""
    only_a: tuple[str, ...]
    """Feature maps of the first model without a counterpart."""
    only_b: tuple[str, ...]
    """Feature maps of the second model without a counterpart."""
    model_a: str
    """The first model."""
    model_b: str
    """The second model."""
    tolerance: float
    """Relative error up to which feature maps count as equal."""
    batch_count: int
    """Over how many batches."""

    @property
    def first_diverging(self) -> DiffRow | None:
        """The first row that diverges, in execution order; None if all agree."""
        return next((row for row in self.rows if row.diverges(self.tolerance)), None)

    def __getitem__(self, name: str) -> DiffRow:
        """Return the row of a feature map of the first model.

        Raises:
            KeyError: There is none of this name.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise unknown_name("feature map", name, [row.name for row in self.rows])

    def plot(self, path: str | os.PathLike[str] | None = None, *, all_rows: bool = False) -> Figure:
        """Draw relative error and cosine over the feature maps, the first diverging one marked.

        Args:
            path: The file of the picture; the suffix sets the format, for example ".png".
            all_rows: Whether to draw all rows, in execution order; otherwise at most the 30 most relevant.

        Raises:
            ImportError: matplotlib is missing: pip install "trocar[plot]".
        """
        from trocar._analysis.pictures import draw_diff, saved  # needs matplotlib, which is an extra

        return saved(draw_diff(self, all_rows=all_rows), path)

    @property
    def verdict(self) -> str:
        """The outcome in a line."""
        if not self.rows:
            return "the models share no feature map names; pair them with taps_a and taps_b"
        first = self.first_diverging
        if first is None:
            return f"all {len(self.rows)} feature maps agree within a relative error of {self.tolerance:g}"
        reason = (
            f"shapes {first.shape_a} and {first.shape_b}"
            if first.shapes_differ
            else f"relative error {number_text(first.relative_error)}, tolerance {self.tolerance:g}"
        )
        return f"first diverging: {_names(first)} ({reason})"

    def __str__(self) -> str:
        right = ("cosine", "relative error", "max difference", "not finite")
        return "\n".join([text_table(_HEAD, self._cells(), right), *self._remarks()])

    def __repr__(self) -> str:
        return f"<Diff of {self.model_a} and {self.model_b}: {self.verdict}>"

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return html_table(_HEAD, self._cells(), "; ".join(self._remarks()))

    def _cells(self) -> list[tuple[str, ...]]:
        return [_cells(row, self.tolerance) for row in self.rows]

    def _remarks(self) -> list[str]:
        sides = ((self.model_a, self.only_a), (self.model_b, self.only_b))
        missing = [f"only in {model}: {_shortened(names)}" for model, names in sides if names]
        return [*missing, f"{self.model_a} and {self.model_b}: {self.verdict}"]


def _shortened(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED:,} more"


def check_tolerance(tolerance: float) -> float:
    """Return it.

    Raises:
        ValueError: It is negative or NaN.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance!r} must be 0 or a positive number")
    return float(tolerance)


def without_copy(diff: Diff, name: str) -> Diff:
    """Return a diff without a row, if an earlier row has its values: a module that returns the output."""
    same = [_numbers(row) for row in diff.rows if row.name != name]
    rows = tuple(row for row in diff.rows if row.name != name or _numbers(row) not in same)
    return replace(diff, rows=rows)


def _numbers(row: DiffRow) -> str:
    """Return everything but the names, as text: NaN does not equal itself."""
    return repr(replace(row, name="", name_b=""))


def _names(row: DiffRow) -> str:
    return row.name if row.name == row.name_b else f"{row.name} / {row.name_b}"


def _cells(row: DiffRow, tolerance: float) -> tuple[str, ...]:
    shape = f"{row.shape_a} / {row.shape_b}" if row.shapes_differ else str(row.shape_a)
    numbers = (row.cosine, row.relative_error, row.max_difference)
    texts = ("", "", "") if row.shapes_differ else (f"{row.cosine:.6f}", *map(number_text, numbers[1:]))
    nonfinite = f"{row.nonfinite_a} / {row.nonfinite_b}" if row.nonfinite_a or row.nonfinite_b else ""
    return _names(row), shape, *texts, nonfinite, "diverges" if row.diverges(tolerance) else ""
