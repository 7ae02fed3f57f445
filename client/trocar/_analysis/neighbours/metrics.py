"""Metrics between features: exact keys of some rows, and bounded estimates for many.

Rows are ranked by a key, the smallest first: the squared Euclidean distance, 1 - cosine, or the negative
inner product. The key of one row and one query depends on these two alone, bit by bit, wherever the row is in
its block: equal rows have equal keys. Products of matrices, in the estimates, do not promise that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from trocar._analysis.moments import Floats
from trocar_api.value_words import not_one_of

Metric = Literal["cosine", "euclidean", "dot"]

_EPSILON = float(np.finfo(np.float64).eps)


def check_metric(metric: str) -> None:
    """Refuse an unknown metric.

    Raises:
        ValueError: It is none of the three.
    """
    if metric not in get_args(Metric):
        raise ValueError(f"metric {not_one_of(metric, get_args(Metric))}")


@dataclass(frozen=True)
class Estimates:
    """Keys of many rows by one query, and how far they may be from the exact ones."""

    keys: Floats
    tolerances: Floats


def square_sums(rows: Floats) -> Floats:
    """Return the squared norm of each row; of equal rows equal."""
    sums: Floats = np.add.reduce(rows * rows, axis=1)
    return sums


def exact_keys(rows: Floats, query: Floats, metric: Metric) -> Floats:
    """Return the key of each row.

    Args:
        rows: Of shape (rows, features), float64.
        query: Of shape (features,), float64.
        metric: What is compared.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if metric == "euclidean":
            return square_sums(rows - query)
        products: Floats = np.add.reduce(rows * query, axis=1)
        if metric == "dot":
            return -products
        lengths = np.sqrt(square_sums(rows)) * np.sqrt(square_sums(query[None]))
        # A row of zeros has no direction: like scikit-learn and faiss, its cosine counts as 0.
        cosines = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
        keys: Floats = 1 - np.clip(cosines, -1, 1)
        return keys


def estimated_keys(rows: Floats, queries: Floats, metric: Metric) -> list[Estimates]:
    """Return the keys of all rows by each query, from one product of matrices.

    The error of an inner product of d elements is at most d eps |x| |q| (Higham, Accuracy and Stability of
    Numerical Algorithms, 2002, section 3.1); taken here with room to spare.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        products = queries @ rows.T
        row_sums, query_sums = square_sums(rows), square_sums(queries)
        row_lengths, slack = np.sqrt(row_sums), 4 * _EPSILON * (rows.shape[1] + 8)
        result = []
        for product, query_sum in zip(products, query_sums, strict=True):
            lengths = row_lengths * np.sqrt(query_sum)
            if metric == "euclidean":
                keys, tolerances = row_sums + query_sum - 2 * product, 2 * slack * (row_sums + query_sum)
            elif metric == "dot":
                keys, tolerances = -product, slack * lengths
            else:
                cosines = np.divide(product, lengths, out=np.zeros_like(product), where=lengths > 0)
                keys, tolerances = 1 - cosines, np.full_like(product, 2 * slack)
            result.append(Estimates(keys, tolerances))
        return result


def distances_of(keys: Floats, metric: Metric) -> Floats:
    """Return what a caller sees of keys: distances, or inner products."""
    if metric == "euclidean":
        return np.sqrt(keys)
    return -keys if metric == "dot" else keys
