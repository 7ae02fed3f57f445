"""Comparison: a model before and after an edit, or two models, with what happened to the best classes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trocar._analysis.diff import Diff, DiffRow
from trocar._analysis.prediction import ClassScore, PredictionCollector, Predictions
from trocar._base.names import few, shortened
from trocar._base.tables import html_table, number_text
from trocar._base.text_tables import text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from trocar._base.tensors import Array

_MOST_ROWS = 12
"""Feature maps, and samples, in the text of a comparison."""
_MOST_NAME = 40
_MOST_MODEL_NAME = 24


@dataclass(frozen=True)
class Side:
    """How tables and pictures call one side of a comparison."""

    name: str
    """A heading: "after", or "resnet50"."""
    phrase: str
    """The same after a noun, as in "score after", or "score in resnet50"."""


@dataclass(frozen=True)
class ClassChange:
    """The best class of one sample, before and after."""

    sample: str
    """The file, the text, or `sample 3`."""
    before: ClassScore
    """The best class before."""
    after: ClassScore
    """The best class after."""
    before_score_after: float
    """The score after of the class that was the best before; NaN where the other model has no such class."""
    number_after: int | None = None
    """The number after of that class; None where the other model has no such class."""

    @property
    def is_changed(self) -> bool:
        """Whether another class is the best; a model may have several classes of one name."""
        if self.number_after is not None:
            return self.after.number != self.number_after
        return (self.before.label, self.before.number) != (self.after.label, self.after.number) and not (
            self.before.name and self.before.name == self.after.name
        )


@dataclass(frozen=True)
class Comparison:
    """A model before and after an edit, or two models; see `Client.compare`.

    found = client.compare("resnet50", "photos/", edits=trocar.edit("layer3", "zero", channels=range(10)))
    found.changed                            # samples whose best class changed
    found["layer4"].relative_error           # as in `Diff`
    print(found)
    found.plot("compared.png")
    """

    diff: Diff
    """The differences of every feature map."""
    classes: tuple[ClassChange, ...]
    """What happened to the best class of each sample; empty where an output is no scores of classes."""
    before: Predictions | None
    """The best classes before; None as above."""
    after: Predictions | None
    """The best classes after."""
    remark: str = ""
    """Why there are no classes."""

    @property
    def sides(self) -> tuple[Side, Side]:
        """Names of the two sides: "before" and "after" of one model, else the names of the models."""
        first, second = self.diff.model_a, self.diff.model_b
        if second in (first, edited(first)):
            return Side("before", "before"), Side("after", "after")
        names = [shortened(name, _MOST_MODEL_NAME) for name in (first, second)]
        return Side(names[0], f"in {names[0]}"), Side(names[1], f"in {names[1]}")

    @property
    def changed(self) -> tuple[ClassChange, ...]:
        """The samples whose best class changed."""
        return tuple(one for one in self.classes if one.is_changed)

    def __getitem__(self, name: str) -> DiffRow:
        """Return the differences of a feature map.

        Raises:
            KeyError: There is none of this name.
        """
        return self.diff[name]

    def plot(self, path: str | os.PathLike[str] | None = None, *, all_rows: bool = False) -> Figure:
        """Draw the differences as `Diff.plot` does, and the scores of the best classes on both sides.

        Args:
            path: The file of the picture; the suffix sets the format, for example ".png".
            all_rows: Whether to draw all rows, in execution order; otherwise at most the 30 most relevant.

        Raises:
            ImportError: matplotlib is missing: pip install "trocar[plot]".
        """
        from trocar._analysis.pictures import draw_comparison, saved  # needs matplotlib, which is an extra

        return saved(draw_comparison(self, all_rows=all_rows), path)

    @property
    def verdict(self) -> str:
        """The outcome in a line."""
        if not self.classes:
            return self.diff.verdict
        return f"{len(self.changed)} of {len(self.classes)} samples have another best class"

    def __str__(self) -> str:
        classes, values = self._class_head(), self._value_head()
        right = tuple(title for title in classes if "score" in title)
        parts = [text_table(classes, self._class_cells(), right)] if self.classes else []
        rows = self._value_cells()
        parts += [text_table(values, rows, values[1:])] if rows else []
        return "\n\n".join([*parts, "\n".join(self._remarks())])

    def __repr__(self) -> str:
        return f"<Comparison of {self.diff.model_a} and {self.diff.model_b}: {self.verdict}>"

    def _repr_html_(self) -> str:
        """Show the tables in a notebook."""
        classes = html_table(self._class_head(), self._class_cells()) if self.classes else ""
        values = html_table(self._value_head(), self._value_cells(), "; ".join(self._remarks()))
        return classes + values

    def _class_head(self) -> tuple[str, ...]:
        first, second = self.sides
        its = (f"its score {second.phrase}",) if self._has_counterparts else ()
        return "sample", first.name, f"score {first.phrase}", *its, second.name, f"score {second.phrase}", ""

    @property
    def _has_counterparts(self) -> bool:
        """Whether the best class before, of any shown sample, is a class of the second model, too."""
        return any(one.number_after is not None for one in self.classes[:_MOST_ROWS])

    def _value_head(self) -> tuple[str, ...]:
        means = (f"mean {side.phrase}" for side in self.sides)
        return "feature map", *means, "cosine", "relative error", "max difference"

    def _class_cells(self) -> list[tuple[str, ...]]:
        return [
            (
                shortened(one.sample, _MOST_NAME),
                one.before.label,
                number_text(one.before.score),
                *((self._counterpart(one),) if self._has_counterparts else ()),
                one.after.label,
                number_text(one.after.score),
                "changed" if one.is_changed else "",
            )
            for one in self.classes[:_MOST_ROWS]
        ]

    @staticmethod
    def _counterpart(one: ClassChange) -> str:
        return "" if one.number_after is None else number_text(one.before_score_after)

    def _value_cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row.name,
                *map(number_text, (row.mean_a, row.mean_b)),
                f"{row.cosine:.6f}",
                *map(number_text, (row.relative_error, row.max_difference)),
            )
            for row in self._most_different()
        ]

    def _most_different(self) -> list[DiffRow]:
        """Return the rows that differ most, in execution order; of values that can be compared."""
        rows = [row for row in self.diff.rows if not row.shapes_differ]
        errors = [math.inf if math.isnan(row.relative_error) else row.relative_error for row in rows]
        places = sorted(range(len(rows)), key=lambda place: -errors[place])[:_MOST_ROWS]
        return [rows[place] for place in sorted(places)]

    def _remarks(self) -> list[str]:
        strange = [row for row in self.diff.rows if row.shapes_differ]
        rows, classes = len(self.diff.rows) - len(strange), len(self.classes)
        left = (
            [f"the first {_MOST_ROWS} of {classes} samples; .classes has all"] if classes > _MOST_ROWS else []
        )
        if rows > _MOST_ROWS:
            left.append(f"the {_MOST_ROWS} of {rows} feature maps that differ most; .diff has all")
        if strange:
            shapes = [f"{row.name} ({row.shape_a} and {row.shape_b})" for row in strange]
            left.append(f"not compared, as the shapes differ: {few(shapes)}")
        return [*left, *([self.remark] if self.remark else []), self.verdict]


def edited(model_id: str) -> str:
    """Return how a comparison calls a model with edits."""
    return f"{model_id}, edited"


class ClassChangeCollector:
    """Collects the best classes of two outputs, batch by batch; without classes after the first problem.

    Args:
        before: Collects those before; None where a model's output is no scores of classes.
        after: Collects those after.
        remark: Why there are none.
    """

    def __init__(
        self, before: PredictionCollector | None, after: PredictionCollector | None, remark: str = ""
    ) -> None:
        self._sides = None if before is None or after is None else (before, after)
        self._moved: list[tuple[float, int | None]] = []
        self._remark = remark

    def spell(self, before: Mapping[int, str], after: Mapping[int, str]) -> None:
        """Add texts of the tokens that the next outputs score, by number."""
        for side, texts in zip(self._sides or (), (before, after), strict=False):
            side.token_texts.update(texts)

    def add(self, before: Array | None, after: Array | None, label: Callable[[int], str]) -> None:
        """Add the outputs of a batch."""
        if self._sides is None or before is None or after is None:
            return
        first, second = self._sides
        try:
            rows = first.add(before, label)
            rows_after = second.add(after, label)
        except ValueError as error:
            self._sides, self._remark = None, f"no classes are compared: {error}"
            return
        for row, row_after in zip(rows, rows_after, strict=True):
            number = second.counterpart(first, int(row.argmax()), row_after)
            self._moved.append((math.nan if number is None else float(row_after[number]), number))

    def result(self, diff: Diff) -> Comparison:
        """Return what was collected, with the differences of the values."""
        if self._sides is None:
            return Comparison(diff, (), None, None, self._remark)
        before, after = (side.result() for side in self._sides)
        classes = tuple(
            ClassChange(one.sample, one.top, other.top, *moved)
            for one, other, moved in zip(before, after, self._moved, strict=True)
        )
        return Comparison(diff, classes, before, after)
