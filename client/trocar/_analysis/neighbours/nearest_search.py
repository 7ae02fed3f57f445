"""Nearest search: the k nearest rows to some queries, from rows that arrive in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trocar._analysis.moments import Floats
from trocar._analysis.neighbours.metrics import (
    Estimates,
    Metric,
    check_metric,
    distances_of,
    estimated_keys,
    exact_keys,
)
from trocar._base.tensors import Array

Indices = NDArray[np.int64]

_QUERIES_AT_ONCE = 256
_NO_ROW = -1


class NearestSearch:
    """Exact search by comparison with every row; memory is a block, and k rows' numbers for each query.

        search = NearestSearch(queries, k=5, metric="cosine")
        for block in blocks:
            search.add(block)
        indices, distances = search.result()

    Equal to faiss' `IndexFlatL2` and `IndexFlatIP`, but in float64: estimates from a product of matrices
    choose the rows that may be among the nearest, and their exact keys decide. Of equal rows the first is the
    nearer. Rows with NaN or infinities have no distance: they are left out and counted.

    Args:
        queries: Of shape (queries, features).
        k: How many rows for each query, at least 1.
        metric: What is compared.
        own_rows: For each query the row that is left out of its own neighbours; -1 for none.

    Raises:
        ValueError: `k` or the metric is none; queries are not finite, or zeros that have no cosine.
    """

    def __init__(self, queries: Array, k: int, metric: Metric, own_rows: Sequence[int] | None = None) -> None:
        check_metric(metric)
        self._k = check_count(k)
        self.metric: Metric = metric
        self._queries = as_rows(queries)
        _check_queries(self._queries, metric)
        count = len(self._queries)
        self._own = list(own_rows) if own_rows is not None else [_NO_ROW] * count
        self._keys = [np.empty(0) for _ in range(count)]
        self._indices: list[Indices] = [np.empty(0, np.int64) for _ in range(count)]
        self.row_count = 0
        """How many rows were compared or left out."""
        self._left_out_count = 0

    def add(self, rows: Array) -> list[int]:
        """Compare the next rows, of shape (rows, ...), flattened; return those left out, not finite.

        Raises:
            ValueError: They have another number of features than the queries, or complex ones.
        """
        block = as_rows(rows)
        if block.shape[1] != self._queries.shape[1]:
            raise ValueError(
                f"the query has {self._queries.shape[1]:,} features, and the rows have {block.shape[1]:,}; "
                "give a query of the same feature map, reduced in the same way"
            )
        places = np.arange(self.row_count, self.row_count + len(block), dtype=np.int64)
        self.row_count += len(block)
        finite = np.flatnonzero(np.isfinite(block).all(axis=1))
        left_out: list[int] = np.delete(places, finite).tolist()
        if left_out:
            self._left_out_count += len(left_out)
            block, places = block[finite], places[finite]
        for start in range(0, len(self._queries) if len(block) else 0, _QUERIES_AT_ONCE):
            queries = self._queries[start : start + _QUERIES_AT_ONCE]
            for offset, estimates in enumerate(estimated_keys(block, queries, self.metric)):
                self._merge(start + offset, block, places, estimates)
        return left_out

    def result(self) -> tuple[Indices, Floats]:
        """Return the rows and their distances, nearest first, of shape (queries, k).

        Inner products in place of distances where metric="dot".

        Raises:
            ValueError: There are fewer rows than k.
        """
        for own, indices in zip(self._own, self._indices, strict=True):
            if len(indices) < self._k:
                raise ValueError(self._too_few(len(indices), own != _NO_ROW))
        return np.stack(self._indices), distances_of(np.stack(self._keys), self.metric)

    @property
    def nearest(self) -> set[int]:
        """Rows that are among the nearest of some query so far."""
        return self.shown(len(self._queries))

    def shown(self, count: int) -> set[int]:
        """Return the rows that are among the nearest of one of the first queries so far."""
        return {index for indices in self._indices[:count] for index in indices.tolist()}

    def _too_few(self, count: int, has_own: bool) -> str:
        reasons = [f"{self._left_out_count:,} are not finite"] if self._left_out_count else []
        reasons += ["the sample itself is left out"] if has_own else []
        why = f" ({', '.join(reasons)})" if reasons else ""
        return f"k={self._k} exceeds the {count:,} rows that can be compared{why}; ask for at most {count:,}"

    def _merge(self, query: int, block: Floats, places: Indices, estimates: Estimates) -> None:
        """Join the k nearest so far with the rows of a block that may be nearer."""
        is_possible = self._is_possible(query, estimates)
        if self._own[query] != _NO_ROW:
            is_possible &= places != self._own[query]
        chosen = np.flatnonzero(is_possible)
        if not len(chosen):
            return
        keys = np.concatenate(
            [self._keys[query], exact_keys(block[chosen], self._queries[query], self.metric)]
        )
        indices = np.concatenate([self._indices[query], places[chosen]])
        nearest = np.lexsort((indices, keys))[: self._k]
        self._keys[query], self._indices[query] = keys[nearest], indices[nearest]

    def _is_possible(self, query: int, estimates: Estimates) -> NDArray[np.bool_]:
        """Tell the rows whose exact key may be among the k smallest."""
        keys, tolerances = estimates.keys, estimates.tolerances
        bound, most = np.inf, self._k + 1  # one more: the query's own row may be among them
        if len(self._keys[query]) == self._k:
            bound = self._keys[query][-1]
        if len(keys) > most:
            upper = np.partition(keys + tolerances, most - 1)[most - 1]
            bound = min(bound, upper) if np.isfinite(upper) else bound
        with np.errstate(invalid="ignore"):  # an estimate that overflowed may be anything
            return ~(keys - tolerances > bound)


def as_rows(values: Array) -> Floats:
    """Return rows as (rows, features) in float64, each sample flattened.

    Raises:
        ValueError: They are a single number, or complex.
    """
    if not values.ndim or np.iscomplexobj(values):
        raise ValueError("features are real numbers, one row for each sample")
    return np.ascontiguousarray(values.reshape(len(values), int(np.prod(values.shape[1:]))), np.float64)


def check_count(k: object) -> int:
    """Return k.

    Raises:
        ValueError: It is no positive integer.
    """
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise ValueError(f"k={k!r} must be a positive integer")
    return int(k)


def _check_queries(queries: Floats, metric: Metric) -> None:
    if not len(queries):
        raise ValueError("there is no query; give at least one")
    if not np.isfinite(queries).all():
        raise ValueError("the query has NaN or infinities, so that nothing is near it")
    if metric == "cosine" and not queries.any(axis=1).all():
        raise ValueError("a query of zeros has no direction; use metric='euclidean'")
