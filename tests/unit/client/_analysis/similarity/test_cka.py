"""Linear CKA against the direct formulas over whole feature matrices in float64."""

import math
from pathlib import Path

import numpy as np
import pytest

import trocar
from tests.unit.client._analysis.conftest import Analyse
from tests.unit.client._analysis.fake_client import FakeModels, Function
from trocar._base.tensors import Array


def images(count: int = 20, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, 3, 4, 4)).astype(np.float32)


def layer(seed: int, width: int, offset: float = 0.0) -> Function:
    def compute(batch: Array) -> Array:
        weights = np.random.default_rng(seed).standard_normal((48, width))
        return np.tanh(batch.reshape(len(batch), -1).astype(np.float64) @ weights / 5) + offset

    return compute


def constant(batch: Array) -> Array:
    return np.full((len(batch), 7), 0.1)


def one_nan(batch: Array) -> Array:
    values = layer(1, 9)(batch)
    return np.where(values == values.max(), np.nan, values)


A = {"first": layer(1, 9), "second": layer(2, 30), "third": lambda x: x * 2}
B = {"first": layer(4, 12), "second": layer(5, 3)}
MODELS = {"a": A, "b": B, "odd": {"constant": constant, "nan": one_nan, "fine": layer(1, 9)}}


def features(function: Function, batch: Array) -> Array:
    return np.asarray(function(batch), np.float64).reshape(len(batch), -1)


def direct(x: Array, y: Array) -> float:
    """Kornblith et al. 2019: |Y^T X|^2 / (|X^T X| |Y^T Y|) of centred features."""
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    return float(np.linalg.norm(y.T @ x) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)))


def unbiased_hsic(k: Array, m: Array) -> float:
    """Song et al. 2012, equation 5, as written there."""
    n = len(k)
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    ones = np.ones(n)
    middle = (ones @ k @ ones) * (ones @ m @ ones) / ((n - 1) * (n - 2))
    return float((np.trace(k @ m) + middle - 2 / (n - 2) * (ones @ k @ m @ ones)) / (n * (n - 3)))


def direct_debiased(x: Array, y: Array) -> float:
    k, m = x @ x.T, y @ y.T
    return unbiased_hsic(k, m) / math.sqrt(unbiased_hsic(k, k) * unbiased_hsic(m, m))


def test_cka_of_one_model_is_the_direct_formula(analyse: Analyse) -> None:
    x = images()
    found = analyse(FakeModels(MODELS), "cka", "a", x, ["first", "second", "third"], batch_size=6)
    expected = [[direct(features(f, x), features(g, x)) for g in A.values()] for f in A.values()]
    np.testing.assert_allclose(found.matrix, expected, rtol=1e-12)
    assert found.rows == found.columns == ("first", "second", "third")
    assert (found.count, found.model_id, found.other) == (20, "a", "a")


def test_cka_of_two_models_has_a_row_for_each_of_the_first(analyse: Analyse) -> None:
    x = images()
    found = analyse(FakeModels(MODELS), "cka", "a", x, "**", other="b", batch_size=7)
    expected = [[direct(features(f, x), features(g, x)) for g in B.values()] for f in A.values()]
    np.testing.assert_allclose(found.matrix, expected, rtol=1e-12)
    assert (found.rows, found.columns) == (("first", "second", "third"), ("first", "second"))


def test_debiased_cka_is_that_of_song(analyse: Analyse) -> None:
    x = images(12)
    found = analyse(FakeModels(MODELS), "cka", "a", x, "**", other="b", debiased=True, batch_size=5)
    expected = [[direct_debiased(features(f, x), features(g, x)) for g in B.values()] for f in A.values()]
    np.testing.assert_allclose(found.matrix, expected, rtol=1e-9)


def test_other_taps_make_the_columns_with_one_pass_of_one_model(analyse: Analyse) -> None:
    fake = FakeModels(MODELS)
    found = analyse(fake, "cka", "a", images(), ["first", "second"], other_taps="third")
    assert (found.rows, found.columns) == (("first", "second"), ("third",))
    assert len(fake.streams) == 1


def test_other_taps_are_those_of_the_other_model(analyse: Analyse) -> None:
    x = images()
    found = analyse(FakeModels(MODELS), "cka", "a", x, "third", other="b", other_taps=["second"])
    assert found["third", "second"] == pytest.approx(
        direct(features(A["third"], x), features(B["second"], x)), rel=1e-12
    )


def test_batches_from_a_generator_reach_both_models(analyse: Analyse) -> None:
    x = images()
    batches = (x[start : start + 3] for start in range(0, 20, 3))
    found = analyse(FakeModels(MODELS), "cka", "a", batches, "second", other="b", other_taps="first")
    assert found.count == 20
    assert found["second", "first"] == pytest.approx(
        direct(features(A["second"], x), features(B["first"], x)), rel=1e-12
    )


def test_an_offset_of_1e8_leaves_the_digits_that_the_features_have(analyse: Analyse) -> None:
    x = images()
    models = {"far": {"near": layer(1, 9), "far": layer(2, 30, offset=1e8)}}
    found = analyse(FakeModels(models), "cka", "far", x, "**")
    shifted = features(layer(2, 30, offset=1e8), x) - 1e8
    assert found["near", "far"] == pytest.approx(direct(features(layer(1, 9), x), shifted), rel=1e-7)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter(analyse: Analyse, scale: float) -> None:
    models = {"m": {"plain": layer(1, 9), "scaled": lambda x: (layer(2, 30)(x) * scale).astype(np.float32)}}
    found = analyse(FakeModels(models), "cka", "m", images(), "**")
    x = images()
    assert found["plain", "scaled"] == pytest.approx(
        direct(features(layer(1, 9), x), features(layer(2, 30), x)), rel=1e-5
    )


@pytest.mark.parametrize("debiased", [False, True])
def test_what_does_not_vary_or_is_not_finite_is_nan_alone(analyse: Analyse, debiased: bool) -> None:
    found = analyse(FakeModels(MODELS), "cka", "odd", images(), "**", debiased=debiased, batch_size=20)
    assert np.isnan(found.matrix).tolist() == [[True] * 3, [True] * 3, [True, True, False]]
    assert found["fine", "fine"] == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize(("count", "debiased"), [(1, False), (3, True)])
def test_too_few_samples_are_refused(analyse: Analyse, count: int, debiased: bool) -> None:
    with pytest.raises(ValueError, match=f"at least .* samples, received {count}"):
        analyse(FakeModels(MODELS), "cka", "a", images(count), "first", debiased=debiased)


@pytest.mark.parametrize(("count", "debiased"), [(2, False), (4, True)])
def test_just_enough_samples_are_compared(analyse: Analyse, count: int, debiased: bool) -> None:
    found = analyse(FakeModels(MODELS), "cka", "a", images(count), "first", debiased=debiased)
    assert found.matrix.shape == (1, 1)


def test_feature_maps_without_a_row_for_each_sample_are_refused(analyse: Analyse) -> None:
    models = {"m": {"rows": layer(1, 4), "mean": lambda x: x.mean(axis=0)}}
    with pytest.raises(ValueError, match="one row for each sample"):
        analyse(FakeModels(models), "cka", "m", images(), "**")


def test_features_of_another_size_in_a_later_batch_are_refused(analyse: Analyse) -> None:
    batches = [np.zeros((2, 3, 4, 4)), np.zeros((2, 3, 5, 5))]
    with pytest.raises(ValueError, match=r"has 48 features .* and 75 "):
        analyse(FakeModels(MODELS), "cka", "a", iter(batches), "third")


def test_a_tap_without_values_is_refused(analyse: Analyse) -> None:
    tap = trocar.tap("first", stats=["mean"], values=False)
    with pytest.raises(ValueError, match="'first' has values=False"):
        analyse(FakeModels(MODELS), "cka", "a", images(), [tap])


def test_unknown_rows_name_the_nearest(analyse: Analyse) -> None:
    found = analyse(FakeModels(MODELS), "cka", "a", images(), ["first", "second"])
    with pytest.raises(KeyError, match="no row 'frist'; nearest: first"):
        found["frist", "first"]
    with pytest.raises(KeyError, match="no column 'thirds'"):
        found["first", "thirds"]


def test_cka_prints_as_a_table(analyse: Analyse) -> None:
    found = analyse(FakeModels(MODELS), "cka", "a", images(), ["first", "second"])
    title, head, first, _ = str(found).splitlines()
    assert title == "linear CKA, a, 20 samples"
    assert head.split() == ["first", "second"]
    assert first.split()[:2] == ["first", "1.000"]
    assert "<th>second</th>" in found._repr_html_()


def test_many_columns_are_numbered(analyse: Analyse) -> None:
    models = {"deep": {f"layer{index}": layer(index, 4) for index in range(10)}, "b": B}
    alone = str(analyse(FakeModels(models), "cka", "deep", images(), "**"))
    assert alone.splitlines()[2].startswith("0 layer0")
    both = str(analyse(FakeModels(models), "cka", "b", images(), "first", other="deep", other_taps="**"))
    assert both.splitlines()[-1] == "9 = layer9"


def test_the_plot_is_a_picture(analyse: Analyse, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = analyse(FakeModels(MODELS), "cka", "odd", images(), "**")
    figure = found.plot(tmp_path / "cka.png")
    assert (tmp_path / "cka.png").read_bytes().startswith(b"\x89PNG")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["constant", "nan", "fine"]
    np.testing.assert_array_equal(np.ma.filled(axes.images[0].get_array(), np.nan), found.matrix)
