"""Text of a comparison of two models whose classes or values do not correspond."""

import math

from trocar._analysis.comparison import ClassChange, Comparison
from trocar._analysis.diff import Diff, DiffRow
from trocar._analysis.prediction import ClassScore

ALIKE = DiffRow("conv", "conv", (1, 4), (1, 4), 0.5, 1.0, 2.0, 0, 0, 0.1, 0.2)
STRANGE = DiffRow("fc", "fc", (1, 1000), (1, 3), math.nan, math.nan, math.nan, 0, 0)


def comparison(*rows: DiffRow, number_after: int | None) -> Comparison:
    score = math.nan if number_after is None else 0.25
    change = ClassChange("a.png", ClassScore(7, "cat", 0.5), ClassScore(2, "dog", 0.75), score, number_after)
    return Comparison(Diff(rows, (), (), "one", "two", 1e-5, 1), (change,), None, None)


def test_a_class_that_the_other_model_does_not_have_has_no_column() -> None:
    shown = str(comparison(ALIKE, number_after=None))
    assert "nan" not in shown
    assert "its score" not in shown


def test_a_class_that_the_other_model_has_keeps_its_column() -> None:
    shown = str(comparison(ALIKE, number_after=7))
    assert "its score in two" in shown
    assert "0.25" in shown


def test_no_two_columns_have_one_name() -> None:
    head = str(comparison(ALIKE, number_after=7)).splitlines()[0]
    assert ["score in one" in head, "score in two" in head, "its score in two" in head] == [True] * 3


def test_values_of_other_shapes_are_named_and_have_no_row() -> None:
    shown = str(comparison(ALIKE, STRANGE, number_after=None))
    assert "not compared, as the shapes differ: fc ((1, 1000) and (1, 3))" in shown
    assert [line for line in shown.splitlines() if line.startswith("fc")] == []
    assert "nan" not in shown


def test_without_values_of_one_shape_there_is_no_table_of_values() -> None:
    assert "feature map" not in str(comparison(STRANGE, number_after=None))
