"""Which best classes count as changed."""

import math

from trocar._analysis.comparison import ClassChange, Comparison
from trocar._analysis.diff import Diff
from trocar._analysis.prediction import ClassScore


def change(before: ClassScore, after: ClassScore, number_after: int | None = None) -> ClassChange:
    return ClassChange("sample", before, after, before_score_after=math.nan, number_after=number_after)


def test_samples_are_counted_whose_best_class_is_another_one() -> None:
    cat, dog, other_cat = ClassScore(1, "cat", 0.9), ClassScore(2, "dog", 0.8), ClassScore(5, "cat", 0.7)
    same = [change(cat, cat), change(cat, other_cat), change(cat, other_cat, 5)]
    changed = [
        change(cat, dog),
        change(cat, other_cat, 1),
        change(ClassScore(3, "", 0.5), ClassScore(4, "", 0.5)),
    ]
    diff = Diff((), (), (), "a", "b", 0.0, 1)
    found = Comparison(diff, (*same, *changed), None, None)
    assert found.changed == tuple(changed)
    assert found.verdict == "3 of 6 samples have another best class"
