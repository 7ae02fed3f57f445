"""Folds of cross-validation, as scikit-learn makes them without shuffling.

Of `sklearn/model_selection/_split.py` (scikit-learn 1.9): `KFold`, `StratifiedKFold` and `GroupKFold`. The
library itself is not needed by a server; the tests compare with it.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Folds: TypeAlias = NDArray[np.int64]
"""The fold of each sample, from 0."""


def plain_folds(sample_count: int, fold_count: int) -> Folds:
    """Return folds of consecutive samples; the first are one larger where the number does not divide."""
    sizes = np.full(fold_count, sample_count // fold_count)
    sizes[: sample_count % fold_count] += 1
    return np.repeat(np.arange(fold_count), sizes)


def stratified_folds(labels: NDArray[np.int64], fold_count: int) -> Folds:
    """Return folds with about the same share of each class."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    by_appearance = np.argsort(np.argsort(first))[inverse]  # classes in the order of their first samples
    count, ordered = len(first), np.sort(by_appearance)
    shares = [np.bincount(ordered[fold::fold_count], minlength=count) for fold in range(fold_count)]
    folds = np.empty(len(labels), np.int64)
    for label in range(count):
        of_class = [share[label] for share in shares]
        folds[by_appearance == label] = np.repeat(np.arange(fold_count), of_class)
    return folds


def group_folds(groups: NDArray[np.int64], fold_count: int) -> Folds:
    """Return folds of whole groups: the largest first, each into the fold with the fewest samples."""
    _, inverse = np.unique(groups, return_inverse=True)
    sizes = np.bincount(inverse)
    totals, fold_of = np.zeros(fold_count, np.int64), np.empty(len(sizes), np.int64)
    for group in np.argsort(sizes, kind="stable")[::-1]:
        lightest = int(totals.argmin())
        totals[lightest] += sizes[group]
        fold_of[group] = lightest
    return fold_of[inverse]
