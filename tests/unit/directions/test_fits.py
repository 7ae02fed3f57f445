"""Fits of directions, against scikit-learn, from memory and in blocks."""

# scikit-learn has no types.
# pyright: reportMissingTypeStubs=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits, load_wine
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import r2_score, roc_auc_score
from sklearn.model_selection import GroupKFold, KFold, StratifiedKFold
from threadpoolctl import ThreadpoolController

from trocar_api.reasons import ErrorReason
from trocar_server.directions import (
    DirectionKind,
    DirectionRequest,
    PooledValues,
    PooledValuesBudget,
    fit_place,
)
from trocar_server.directions import linear_fits as linear_fits_module
from trocar_server.directions import logistic as logistic_module
from trocar_server.directions import pooled_values as pooled_values_module
from trocar_server.directions import rows as rows_module
from trocar_server.directions.blas_threads import one_blas_thread
from trocar_server.directions.direction import Direction
from trocar_server.directions.folds import group_folds, plain_folds, stratified_folds
from trocar_server.directions.scores import area_under_curve, determination
from trocar_server.errors import ServiceError

DIGITS: Any
TARGET: Any
WINE: Any
CULTIVAR: Any
DIGITS, TARGET = load_digits(return_X_y=True)
WINE, CULTIVAR = load_wine(return_X_y=True)
LARGE: Any = (TARGET > 4).astype(np.int64)
RANDOM = np.random.default_rng(0)


@pytest.fixture(params=["whole", "blocks"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Read all samples at once, or a few at a time because they do not fit in memory."""
    if request.param == "blocks":
        for module in (rows_module, logistic_module, linear_fits_module):
            monkeypatch.setattr(module, "MEMORY_BYTES", 60_000)
        monkeypatch.setattr(pooled_values_module, "BLOCK_BYTES", 20_000)
    return str(request.param)


def fitted(tmp_path: Path, values: Any, **request: Any) -> Direction:
    rows = np.asarray(values, np.float32)
    norms = np.linalg.norm(rows, axis=1, keepdims=True).astype(np.float32)
    budget = PooledValuesBudget(1 << 30)
    wanted = DirectionRequest("x", sample_count=len(rows), **request)
    with PooledValues(tmp_path, budget, {"a": 3, "b": rows.shape[1]}, len(rows)) as kept:
        half = len(rows) // 2
        for first, part in ((half, slice(half, None)), (0, slice(half))):
            kept.write("b", first, np.hstack([rows, norms])[part].data)
        return fit_place(wanted, kept, "b")


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "many samples": (DIGITS, LARGE, {}),
    "few samples": (DIGITS[:50], LARGE[:50], {}),
    "weak penalty": (DIGITS[:600], LARGE[:600], {"l2": 0.01}),
    "balanced": (DIGITS[:600], (TARGET[:600] == 3).astype(np.int64), {"is_balanced": True}),
    "weighted": (DIGITS[:600], LARGE[:600], {"class_weights": (1.0, 3.0)}),
}


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("case", CASES)
def test_logistic_regression(tmp_path: Path, case: str) -> None:
    values, labels, options = CASES[case]
    weight: Any = options.get("class_weights")
    weights = "balanced" if "is_balanced" in options else weight and dict(enumerate(weight))
    model = LogisticRegression(
        C=1 / options.get("l2", 1.0), class_weight=weights, solver="newton-cg", tol=1e-10, max_iter=10_000
    ).fit(values, labels)
    direction = fitted(
        tmp_path, values, kind=DirectionKind.LOGISTIC, labels=labels, classes=("a", "b"), **options
    )
    np.testing.assert_allclose(direction.vectors, model.coef_, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(direction.bias, model.intercept_, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("reading")
def test_several_classes(tmp_path: Path) -> None:
    values = (WINE - WINE.mean(0)) / WINE.std(0)
    model = LogisticRegression(solver="newton-cg", tol=1e-10, max_iter=10_000)
    model.fit(np.asarray(values, np.float32).astype(np.float64), CULTIVAR)
    direction = fitted(
        tmp_path, values, kind=DirectionKind.LOGISTIC, labels=CULTIVAR, classes=("a", "b", "c"), fold_count=4
    )
    np.testing.assert_allclose(direction.vectors, model.coef_, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(direction.bias, model.intercept_, rtol=1e-6, atol=1e-6)
    assert direction.about.auc is None
    assert len(direction.about.fold_scores) == 4


@pytest.mark.usefixtures("reading")
def test_ridge_regression_of_many_and_few_samples(tmp_path: Path) -> None:
    for count in (500, 40):
        targets = DIGITS[:count].sum(1) + RANDOM.normal(size=count)
        model = Ridge(alpha=2.0).fit(DIGITS[:count], targets)
        direction = fitted(tmp_path, DIGITS[:count], kind=DirectionKind.RIDGE, targets=targets, l2=2.0)
        np.testing.assert_allclose(direction.vectors[0], model.coef_, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(direction.bias[0], model.intercept_, rtol=1e-6)


@pytest.mark.usefixtures("reading")
def test_principal_components(tmp_path: Path) -> None:
    model: Any = PCA(4, svd_solver="full").fit(DIGITS)
    direction = fitted(tmp_path, DIGITS, kind=DirectionKind.PCA, component_count=4)
    np.testing.assert_allclose(direction.vectors, model.components_, atol=1e-6)
    read = DIGITS[:5] @ direction.vectors.T + direction.bias
    np.testing.assert_allclose(read, model.transform(DIGITS[:5]), rtol=1e-6, atol=1e-6)
    assert direction.about.score == pytest.approx(model.explained_variance_ratio_.sum(), abs=1e-12)


@pytest.mark.usefixtures("reading")
def test_a_difference_of_means_has_its_zero_halfway(tmp_path: Path) -> None:
    direction = fitted(
        tmp_path, DIGITS, kind=DirectionKind.MEAN_DIFFERENCE, labels=LARGE, classes=("a", "b"), fold_count=5
    )
    means = [DIGITS[label == LARGE].mean(0) for label in (0, 1)]
    np.testing.assert_allclose(direction.vectors[0], means[1] - means[0], rtol=1e-9, atol=1e-9)
    low, high = (float(mean @ direction.vectors[0] + direction.bias[0]) for mean in means)
    assert low == pytest.approx(-high)
    assert direction.about.mean_norm == pytest.approx(np.linalg.norm(DIGITS, axis=1).mean(), rel=1e-6)
    scale = (DIGITS @ direction.vectors[0]).std()
    assert direction.about.scale[0] == pytest.approx(scale, rel=1e-6)


def test_folds_are_those_of_scikit_learn() -> None:
    for count in (2, 3, 7):
        for labels in (LARGE[:101], RANDOM.integers(0, 4, 97), np.repeat([2, 0, 1], [40, 30, 27])):
            for fold, (_, test) in enumerate(StratifiedKFold(count).split(labels, labels)):
                np.testing.assert_array_equal(np.flatnonzero(stratified_folds(labels, count) == fold), test)
            groups = RANDOM.integers(0, 13, len(labels))
            for fold, (_, test) in enumerate(GroupKFold(count).split(labels, labels, groups)):
                np.testing.assert_array_equal(np.flatnonzero(group_folds(groups, count) == fold), test)
            for fold, (_, test) in enumerate(KFold(count).split(labels)):
                np.testing.assert_array_equal(np.flatnonzero(plain_folds(len(labels), count) == fold), test)


def test_scores_are_those_of_scikit_learn() -> None:
    labels = RANDOM.integers(0, 2, 200)
    scores = np.round(RANDOM.normal(size=(200, 1)) + labels[:, None], 1)  # with ties
    assert area_under_curve(scores, labels) == pytest.approx(roc_auc_score(labels, scores[:, 0]), abs=1e-12)
    assert area_under_curve(scores[:2], np.zeros(2, np.int64)) is None
    targets = RANDOM.normal(size=200)
    assert determination(scores, targets) == pytest.approx(r2_score(targets, scores[:, 0]), abs=1e-12)
    assert determination(scores[:3], np.ones(3)) is None


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ({"labels": [0, 0, 0, 0], "classes": ("a", "b")}, "of one class, 'a'"),
        ({"labels": [0, 1, 1, 3], "classes": ("a", "b", "c")}, "indices of the classes"),
        ({"labels": [0, 1, 0, 1], "classes": ("a", "b", "c")}, "no sample is of class 'c'"),
        ({"labels": [0, 1], "classes": ("a", "b")}, "2 labels for 4 samples"),
        ({"labels": [0, 1, 0, 1], "classes": ("a", "b"), "fold_count": 1}, "nothing to be fitted to"),
        ({"labels": [0, 1, 0, 1], "classes": ("a", "b"), "fold_count": 3}, "class 'a' has 2 samples"),
        (
            {"labels": [0, 1, 0, 1], "classes": ("a", "b"), "fold_count": 2, "groups": [0, 1, 0, 1]},
            "without fold",
        ),
        (
            {
                "labels": [0, 1, 0, 1],
                "classes": ("a", "b"),
                "given_folds": [0, 1, 1, 0],
                "groups": [0, 0, 1, 1],
            },
            "group 0 is in folds 0, 1",
        ),
        (
            {"labels": [0, 1, 0, 1], "classes": ("a", "b"), "given_folds": [7] * 4},
            "all samples are in fold 7",
        ),
        ({"labels": [0, 1, 0, 1], "classes": ("a", "b"), "l2": 0.0}, "l2 is 0"),
    ],
)
def test_what_cannot_be_fitted_is_refused_in_words(request_: dict[str, Any], problem: str) -> None:
    arrays: dict[str, Any] = {
        name: np.array(value) if name in ("labels", "groups", "given_folds") else value
        for name, value in request_.items()
    }
    with pytest.raises(ServiceError, match=problem):
        DirectionRequest("x", DirectionKind.LOGISTIC, 4, **arrays)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    values = DIGITS[:20].copy()
    values[3, 5] = np.nan
    with pytest.raises(ServiceError, match="NaN or infinite"):
        fitted(tmp_path, values, kind=DirectionKind.LOGISTIC, labels=LARGE[:20], classes=("a", "b"))


def test_a_fit_stops_when_it_is_told_to(tmp_path: Path) -> None:
    calls: Iterator[int] = iter(range(3))

    def check() -> None:
        if next(calls, None) is None:
            raise ServiceError(ErrorReason.CANCELLED, "stopped")

    wanted = DirectionRequest("x", DirectionKind.LOGISTIC, len(DIGITS), labels=LARGE, classes=("a", "b"))
    rows = np.hstack([DIGITS, DIGITS[:, :1]]).astype(np.float32)
    with PooledValues(tmp_path, PooledValuesBudget(1 << 30), {"a": 64}, len(DIGITS)) as kept:
        kept.write("a", 0, rows.data)
        with pytest.raises(ServiceError, match="stopped"):
            fit_place(wanted, kept, "a", check)


def test_pooled_values_keep_to_the_budget_and_leave_nothing(tmp_path: Path) -> None:
    budget = PooledValuesBudget(10_000)
    first = PooledValues(tmp_path, budget, {"a": 4, "b": 9}, 100)  # 4 * (5 + 10) * 100
    assert first.byte_count == 6_000
    with pytest.raises(ServiceError, match="6,000 of the server's 10,000; try again") as busy:
        PooledValues(tmp_path, budget, {"a": 10}, 100)
    assert busy.value.reason is ErrorReason.SERVER_BUSY
    with pytest.raises(ServiceError, match="are 40,400 bytes, and the server keeps 10,000") as never:
        PooledValues(tmp_path, budget, {"a": 100}, 100)
    assert never.value.reason is ErrorReason.DIRECTION_REJECTED
    first.close()
    first.close()
    with PooledValues(tmp_path, budget, {"a": 20}, 100):
        assert list(tmp_path.iterdir()) == []


def test_numpy_has_its_threads_back_after_the_last_fit() -> None:
    def threads() -> list[int]:
        listed = ThreadpoolController().select(internal_api="openblas").info()
        return [entry["num_threads"] for entry in listed]

    before = threads()
    with one_blas_thread():
        with one_blas_thread():
            assert set(threads()) <= {1}
        assert set(threads()) <= {1}
    assert threads() == before
