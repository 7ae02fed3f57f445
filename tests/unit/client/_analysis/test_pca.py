"""PCA against the singular value decomposition of centred data, which is what scikit-learn computes."""

from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import save_file

import trocar
from tests.unit.client._analysis.conftest import Analyse
from tests.unit.client._analysis.fake_client import FakeModels
from trocar._analysis import pca as module
from trocar._analysis.moments import Moments
from trocar._analysis.pca import fit
from trocar._base.tensors import Array

CHANNELS = 6


def images(count: int = 12) -> Array:
    return np.random.default_rng(0).standard_normal((count, 3, 4, 4))


def maps(batch: Array) -> Array:
    weights = np.random.default_rng(8).standard_normal((CHANNELS, 3))
    return np.asarray(np.tanh(np.einsum("kc,nchw->nkhw", weights, batch)))


def tokens(batch: Array) -> Array:
    return np.moveaxis(maps(batch).reshape(len(batch), CHANNELS, -1), 1, 2)


FAKE = {"m": {"maps": maps, "tokens": tokens, "wrong": lambda x: x * np.nan}}


def rows(batch: Array) -> Array:
    return np.moveaxis(maps(batch), 1, -1).reshape(-1, CHANNELS)


def svd(data: Array, k: int) -> tuple[Array, Array, Array]:
    """Components, variances and singular values, signs as in scikit-learn's `svd_flip`."""
    _, singular, components = np.linalg.svd(data - data.mean(axis=0), full_matrices=False)
    largest = components[np.arange(len(components)), np.abs(components).argmax(axis=1)]
    return (components * np.sign(largest)[:, None])[:k], singular[:k] ** 2 / (len(data) - 1), singular[:k]


def moments(data: Array) -> Moments:
    return Moments(data.mean(axis=0), np.cov(data, rowvar=False).reshape(data.shape[1], -1), len(data))


@pytest.mark.parametrize("at", ["maps", "tokens"])
def test_components_are_those_of_the_centred_data(analyse: Analyse, at: str) -> None:
    pca = analyse(FakeModels(FAKE), "fit_pca", "m", images(), at, 4, batch_size=5)
    data = rows(images())
    components, variance, singular = svd(data, 4)
    np.testing.assert_allclose(pca.components, components, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(pca.explained_variance, variance, rtol=1e-10)
    np.testing.assert_allclose(
        pca.explained_variance_ratio, variance / data.var(axis=0, ddof=1).sum(), rtol=1e-10
    )
    np.testing.assert_allclose(pca.singular_values, singular, rtol=1e-10)
    np.testing.assert_allclose(pca.mean, data.mean(axis=0), rtol=1e-12)
    assert (pca.count, pca.at, pca.model_id) == (len(data), at, "m")


def test_transform_gives_the_scores_of_the_data(analyse: Analyse) -> None:
    pca = analyse(FakeModels(FAKE), "fit_pca", "m", images(), "maps", 3)
    scores = pca.transform(maps(images()))
    assert scores.shape == (12, 4, 4, 3)
    data = rows(images())
    expected = (data - data.mean(axis=0)) @ svd(data, 3)[0].T
    np.testing.assert_allclose(scores.reshape(-1, 3), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        pca.transform(tokens(images())).reshape(-1, 3), expected, rtol=1e-9, atol=1e-12
    )


def test_transform_refuses_other_channels(analyse: Analyse) -> None:
    pca = analyse(FakeModels(FAKE), "fit_pca", "m", images(), "maps", 3)
    with pytest.raises(ValueError, match="no 6 channels in dimension 1"):
        pca.transform(np.zeros((2, 5, 4, 4)))
    with pytest.raises(ValueError, match="in dimension 9"):
        pca.transform(np.zeros((2, 6)), channel_dim=9)


def test_an_offset_of_1e8_is_taken_off() -> None:
    data = rows(images())
    far = replace(moments(data), mean=data.mean(axis=0) + 1e8)
    np.testing.assert_allclose(fit(far, 2).components, svd(data, 2)[0], rtol=1e-9, atol=1e-12)


def test_constant_channels_have_no_variance_and_no_share() -> None:
    pca = fit(Moments(np.ones(3), np.zeros((3, 3)), 10), 2)
    assert pca.explained_variance.tolist() == [0, 0]
    assert np.isnan(pca.explained_variance_ratio).all()
    np.testing.assert_allclose(pca.components @ pca.components.T, np.eye(2), atol=1e-15)
    assert "nan%" in str(pca)


def test_variances_below_zero_by_rounding_are_zero() -> None:
    data = np.outer(np.arange(5.0), [1.0, 1e-9, 3.0])
    assert (fit(moments(data), 3).explained_variance >= 0).all()


@pytest.mark.parametrize("k", [0, -1, 2.0, True, "3"])
def test_a_k_that_is_no_number_of_components_is_refused(analyse: Analyse, k: object) -> None:
    with pytest.raises(ValueError, match="must be a positive integer"):
        analyse(FakeModels(FAKE), "fit_pca", "m", images(), "maps", k)


@pytest.mark.parametrize(("count", "k"), [(12, 7), (3, 4)])
def test_more_components_than_there_are_are_refused(count: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k}, but"):
        fit(moments(rows(images())[:count]), k)


def test_features_that_are_not_finite_are_refused(analyse: Analyse) -> None:
    with pytest.raises(ValueError, match="'wrong' contain NaN"):
        analyse(FakeModels(FAKE), "fit_pca", "m", images(), "wrong", 1)


def test_what_was_saved_is_loaded_again(analyse: Analyse, tmp_path: Path) -> None:
    pca = analyse(FakeModels(FAKE), "fit_pca", "m", images(), "maps", 3)
    pca.save(tmp_path / "pca.safetensors")
    loaded = trocar.Pca.load(tmp_path / "pca.safetensors")
    for field in fields(pca):
        np.testing.assert_array_equal(getattr(loaded, field.name), getattr(pca, field.name), strict=True)


@pytest.mark.parametrize("before", [[], ["pca.safetensors"]])
def test_a_file_that_cannot_be_written_leaves_what_was_there(
    analyse: Analyse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[str]
) -> None:
    pca = analyse(FakeModels(FAKE), "fit_pca", "m", images(), "maps", 3)
    for name in before:
        (tmp_path / name).write_bytes(b"old")
    monkeypatch.setattr(module, "save_file", Mock(side_effect=OSError("the disk is full")))
    with pytest.raises(OSError, match="the disk is full"):
        pca.save(tmp_path / "pca.safetensors")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == dict.fromkeys(before, b"old")


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_file_that_is_replaced_keeps_its_mode(analyse: Analyse, tmp_path: Path, mode: int) -> None:
    path = tmp_path / "pca.safetensors"
    path.touch()
    path.chmod(mode)
    analyse(FakeModels(FAKE), "fit_pca", "m", images(), "maps", 3).save(path)
    assert path.stat().st_mode & 0o777 == mode


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tensors")
    save_file({"x": np.zeros(3)}, tmp_path / "other.safetensors")
    for name in ("text", "other.safetensors"):
        with pytest.raises(ValueError, match="not a file written by Pca"):
            trocar.Pca.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        trocar.Pca.load(tmp_path / "nowhere")


def test_pca_prints_as_a_table(analyse: Analyse) -> None:
    pca = analyse(FakeModels(FAKE), "fit_pca", "m", images(), "maps", 2)
    lines = str(pca).splitlines()
    assert lines[0] == "2 components of 6 channels at maps, fitted to 192 vectors"
    assert lines[1].split() == ["component", "variance", "share", "sum"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1"]
    assert "<th>share</th>" in pca._repr_html_()


def test_the_plot_is_a_picture(analyse: Analyse, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pca = analyse(FakeModels(FAKE), "fit_pca", "m", images(), "maps", 2)
    figure = pca.plot(tmp_path / "pca.png")
    assert (tmp_path / "pca.png").read_bytes().startswith(b"\x89PNG")
    heights = [bar.get_height() for bar in figure.axes[0].containers[0]]
    np.testing.assert_allclose(heights, 100 * pca.explained_variance_ratio)
