"""RSA against rsatoolbox and SciPy, through both clients."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.spatial.distance
import scipy.stats

import trocar
from tests.support import ROOT
from tests.unit.client._analysis.conftest import Analyse
from tests.unit.client._analysis.fake_client import FakeModels
from trocar._base.tensors import Array

ORACLE = ROOT / "tests/oracles/rsatoolbox/answers.npz"
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def answers() -> dict[str, Array]:
    with np.load(ORACLE) as stored:
        return dict(stored)


def fake(features: dict[str, Array]) -> FakeModels:
    """A model whose feature maps are stored rows, chosen by the first number of each input."""

    def chosen(values: Array) -> Any:
        return lambda batch: values[batch.reshape(len(batch), -1)[:, 0].astype(int)]

    return FakeModels({"a": {name: chosen(values) for name, values in features.items()}})


def places(count: int) -> Array:
    return np.arange(count, dtype=np.float64)[:, None]


def stored(answers: dict[str, Array]) -> FakeModels:
    return fake({name: answers[f"features_{name}"] for name in NAMES})


def spearman(x: Array, y: Array) -> float:
    result: Any = scipy.stats.spearmanr(x, y)
    return float(result.statistic)


@pytest.mark.parametrize("compare", ["spearman", "pearson", "cosine"])
@pytest.mark.parametrize("distance", ["correlation", "euclidean"])
def test_rsa_is_that_of_rsatoolbox(
    analyse: Analyse, answers: dict[str, Array], distance: str, compare: str
) -> None:
    rsa = analyse(
        stored(answers), "rsa", "a", places(12), list(NAMES), distance=distance, compare=compare, batch_size=5
    )
    for name in NAMES:
        np.testing.assert_allclose(rsa.rdm(name), answers[f"{distance}_{name}"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(rsa.matrix, answers[f"{distance}_{compare}"], rtol=1e-9)
    assert rsa["a", "b"] == rsa.matrix[0, 1]
    assert rsa.rdm("c")[2, 4] == 0.0


@pytest.mark.parametrize("distance", ["correlation", "cosine", "sqeuclidean"])
def test_dissimilarities_and_ranks_are_those_of_scipy(analyse: Analyse, distance: Any) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(-3, 4, (20, 7)) + 0.5, rng.standard_normal((20, 40)) + 100
    own = "euclidean" if distance == "sqeuclidean" else distance
    rsa = analyse(fake({"x": x, "y": y}), "rsa", "a", places(20), ["x", "y"], distance=own)
    pairs = [scipy.spatial.distance.pdist(values, distance) for values in (x, y)]
    scale = {"x": 7, "y": 40} if own == "euclidean" else {"x": 1, "y": 1}
    for (name, width), expected in zip(scale.items(), pairs, strict=True):
        upper = rsa.rdm(name)[np.triu_indices(20, 1)]
        np.testing.assert_allclose(upper * width, expected, rtol=1e-8, atol=1e-9)
    assert rsa["x", "y"] == pytest.approx(spearman(*pairs), abs=2e-3)


def test_rdms_of_ones_own_are_columns(analyse: Analyse, answers: dict[str, Array]) -> None:
    labels = np.arange(12) % 3
    categories = (labels[:, None] != labels[None]).astype(np.float32)
    rsa = analyse(stored(answers), "rsa", "a", places(12), "a", rdms={"category": categories})
    upper = np.triu_indices(12, 1)
    expected = spearman(answers["correlation_a"][upper], categories[upper])
    assert rsa["a", "category"] == pytest.approx(expected)
    assert rsa.columns == ("a", "category")
    assert rsa.rdm("category")[0, 1] == 1


def test_two_models_have_rows_and_columns_of_their_own(analyse: Analyse, answers: dict[str, Array]) -> None:
    one, two = stored(answers), fake({"a": answers["features_b"]})
    both = FakeModels({"a": one.models["a"], "b": two.models["a"]})
    rsa = analyse(both, "rsa", "a", places(12), ["a", "c"], other="b", other_taps="a")
    assert (rsa.rows, rsa.columns, rsa.matrix.shape) == (("a", "c"), ("a",), (2, 1))
    assert rsa["a", "a"] == pytest.approx(answers["correlation_spearman"][0, 1])
    assert "a and b, 12 samples" in str(rsa)


def test_samples_that_do_not_vary_or_are_not_finite_have_no_dissimilarity(analyse: Analyse) -> None:
    values = np.random.default_rng(0).standard_normal((6, 5))
    values[1], values[3, 2] = 0.1, np.nan
    for distance, odd in (("correlation", {1, 3}), ("euclidean", {3}), ("cosine", {3})):
        rsa = analyse(fake({"x": values}), "rsa", "a", places(6), "x", distance=distance)
        is_nan = np.isnan(rsa.rdm("x"))
        assert set(np.flatnonzero(is_nan.all(axis=1)).tolist()) == odd
        assert is_nan.sum() == 36 - (6 - len(odd)) ** 2
        assert np.isnan(rsa["x", "x"])


def test_a_matrix_is_drawn_and_becomes_a_table(
    analyse: Analyse, answers: dict[str, Array], tmp_path: Path
) -> None:
    rsa = analyse(stored(answers), "rsa", "a", places(12), list(NAMES))
    rsa.plot(tmp_path / "rsa.png")
    assert len(rsa.plot(tmp_path / "rdms.png", rdms=True).axes) >= 3
    assert (tmp_path / "rdms.png").stat().st_size > 1000
    frame = rsa.to_pandas()
    assert frame.loc["a", "b"] == rsa["a", "b"]
    assert rsa._repr_html_().count("<tr>") == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"distance": "manhattan"}, "must be one of correlation, euclidean, cosine"),
        ({"compare": "tau"}, "must be one of spearman, pearson, cosine"),
        ({"rdms": {"mine": np.ones((3, 3))}}, "there are 12 samples"),
        ({"rdms": {"mine": np.ones((12, 12))}}, "zeros in its diagonal"),
        ({"rdms": {"a": np.zeros((12, 12))}}, "the name of a feature map"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    analyse: Analyse, answers: dict[str, Array], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        analyse(stored(answers), "rsa", "a", places(12), "a", **options)


def test_two_samples_are_too_few(analyse: Analyse, answers: dict[str, Array]) -> None:
    with pytest.raises(ValueError, match="at least 3 samples"):
        analyse(stored(answers), "rsa", "a", places(2), "a")


def test_names_are_looked_up() -> None:
    zero = np.zeros((3, 3))
    rsa = trocar.Rsa(np.ones((1, 1)), ("a",), ("b",), "m", "n", "cosine", "pearson", {"a": zero}, {"b": zero})
    with pytest.raises(KeyError, match="no row 'b'"):
        rsa["b", "b"]
    with pytest.raises(KeyError, match="no RDM"):
        rsa.rdm("layer9")
