"""Exact search against faiss' flat indices and scikit-learn."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from tests.support import ROOT
from trocar._analysis.neighbours.metrics import Metric
from trocar._analysis.neighbours.nearest_search import Indices, NearestSearch
from trocar._base.tensors import Array

FAISS = Path(ROOT / "tests/oracles/faiss/answers.npz")
METRICS: tuple[Metric, ...] = ("cosine", "euclidean", "dot")


def searched(
    rows: Array, queries: Array, k: int, metric: Metric, block: int, own: list[int] | None = None
) -> tuple[Indices, Array]:
    search = NearestSearch(queries, k, metric, own)
    for start in range(0, len(rows), block):
        search.add(rows[start : start + block])
    return search.result()


def as_first(indices: Array) -> Array:
    """Rows 300 to 309 are equal to 0 to 9; faiss' inner products name the later one first."""
    return np.where((indices >= 300) & (indices < 310), indices - 300, indices)


@pytest.mark.parametrize("block", [1, 7, 64, 400])
@pytest.mark.parametrize("metric", METRICS)
def test_neighbours_are_those_of_faiss(metric: Metric, block: int) -> None:
    with np.load(FAISS) as answers:
        indices, distances = searched(answers["rows"], answers["queries"], 10, metric, block)
        assert as_first(indices).tolist() == as_first(answers[f"{metric}_indices"]).tolist()
        expected = answers[f"{metric}_distances"].astype(np.float64)
    if metric == "euclidean":
        expected = np.sqrt(np.maximum(expected, 0))
    if metric == "cosine":
        expected = 1 - expected
    np.testing.assert_allclose(distances, expected, rtol=1e-5, atol=2e-3 if metric == "euclidean" else 1e-6)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_neighbours_far_from_the_origin_are_those_of_scikit_learn(metric: Metric, dtype: str) -> None:
    rng = np.random.default_rng(3)
    rows = (rng.standard_normal((300, 8)) + 50).astype(dtype)  # squares cancel in the usual expansion
    indices, distances = searched(rows, rows[:20] + 0.5, 5, metric, 32)
    brute = NearestNeighbors(n_neighbors=300, metric=metric, algorithm="brute")
    far, order = brute.fit(rows.astype(np.float64)).kneighbors((rows[:20] + 0.5).astype(np.float64))
    np.testing.assert_allclose(distances, far[:, :5], rtol=1e-6, atol=1e-9)
    if dtype == "float64":
        assert indices.tolist() == order[:, :5].tolist()


@pytest.mark.parametrize("metric", METRICS)
def test_of_equal_rows_the_first_is_the_nearer(metric: Metric) -> None:
    rng = np.random.default_rng(1)
    kinds = rng.standard_normal((3, 33)).astype(np.float32)
    choice = rng.integers(0, 3, 500)
    rows, queries = kinds[choice], rng.standard_normal((4, 33)).astype(np.float32)
    indices, distances = searched(rows, queries, 40, metric, 13)
    for row, far in zip(indices, distances, strict=True):
        nearest = choice[row[0]]
        assert row.tolist() == np.flatnonzero(choice == nearest)[:40].tolist()
        assert len(set(far.tolist())) == 1


def test_a_sample_can_be_left_out_of_its_own_neighbours() -> None:
    rows = np.arange(10.0)[:, None]
    indices, _ = searched(rows, rows[[4, 0]], 2, "euclidean", 3, [4, -1])
    assert indices.tolist() == [[3, 5], [0, 1]]


def test_rows_that_are_not_finite_are_left_out_and_told() -> None:
    rows = np.arange(12.0).reshape(6, 2)
    rows[1, 0], rows[4, 1] = np.nan, np.inf
    search = NearestSearch(np.array([[2.0, 3.0]]), 4, "euclidean")
    assert search.add(rows[:3]) == [1]
    assert search.add(rows[3:]) == [4]
    assert search.result()[0].tolist() == [[0, 2, 3, 5]]


def test_rows_of_zeros_are_at_right_angles_to_everything() -> None:
    rows = np.array([[0.0, 0.0], [-1.0, 0.0], [1.0, 1.0]])
    indices, distances = searched(rows, np.array([[1.0, 0.0]]), 3, "cosine", 2)
    assert indices.tolist() == [[2, 0, 1]]
    np.testing.assert_allclose(distances, [[1 - np.sqrt(0.5), 1, 2]])


@pytest.mark.parametrize(
    ("rows", "query", "k", "metric", "words"),
    [
        (np.ones((3, 2)), np.ones((1, 2)), 4, "dot", "k=4 exceeds the 3 rows"),
        (np.full((3, 2), np.nan), np.ones((1, 2)), 1, "dot", "3 are not finite"),
        (np.ones((3, 2)), np.ones((1, 3)), 1, "dot", "3 features, and the rows have 2"),
        (np.ones((3, 2)), np.full((1, 2), np.nan), 1, "dot", "the query has NaN"),
        (np.ones((3, 2)), np.zeros((1, 2)), 1, "cosine", "no direction"),
        (np.ones((3, 2)), np.ones((0, 2)), 1, "dot", "no query"),
        (np.ones((3, 2)), np.ones((1, 2)), 0, "dot", "positive integer"),
        (np.ones((3, 2)), np.ones((1, 2)), 1, "l2", "must be one of cosine, euclidean, dot"),
        (np.ones((3, 2)) * 1j, np.ones((1, 2)), 1, "dot", "real numbers"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    rows: Array, query: Array, k: int, metric: Metric, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        searched(rows, query, k, metric, 8)


def test_memory_does_not_grow_with_the_rows() -> None:
    import tracemalloc

    search = NearestSearch(np.ones((2, 64)), 3, "euclidean")
    block = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
    peaks = []
    tracemalloc.start()
    for _ in range(3):
        for _ in range(20):
            search.add(block)
        peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert peaks[-1] < peaks[0] + 20_000
