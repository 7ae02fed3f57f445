"""Scores of fitted vectors on samples: accuracy, area under the ROC curve, coefficient of determination."""

import numpy as np

from trocar_server.directions.direction_request import Ints
from trocar_server.directions.rows import Floats


def accuracy(scores: Floats, labels: Ints) -> float:
    """Return the share of samples whose class has the largest score; of one score its sign decides."""
    chosen = (scores[:, 0] > 0).astype(np.int64) if scores.shape[1] == 1 else scores.argmax(1)
    return float((chosen == labels).mean())


def area_under_curve(scores: Floats, labels: Ints) -> float | None:
    """Return the area under the ROC curve; None where one class is missing.

    The share of pairs of both classes in which the second has the larger score; equal ones count half (Hanley
    and McNeil 1982).
    """
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return None
    _, inverse, counts = np.unique(scores[:, 0], return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[inverse]  # of equal scores the mean
    return float((ranks[labels == 1].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def determination(scores: Floats, targets: Floats) -> float | None:
    """Return R^2; None for targets that are all equal."""
    total = float(np.square(targets - targets.mean()).sum())
    if total == 0.0:
        return None
    return 1.0 - float(np.square(targets - scores[:, 0]).sum()) / total
