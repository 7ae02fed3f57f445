"""FID against SciPy's matrix square root, and against the features themselves where that one is weak."""

import numpy as np
import pytest
import scipy.linalg

import trocar
from tests.unit.client._analysis.conftest import Analyse
from tests.unit.client._analysis.fake_client import FakeModels
from trocar._base.tensors import Array

CHANNELS = 6


def images(count: int, seed: int, shift: float = 0.0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, 3, 4, 4)) * (1 + shift) + shift


def vectors(batch: Array) -> Array:
    weights = np.random.default_rng(9).standard_normal((48, CHANNELS))
    return np.asarray(np.tanh(batch.reshape(len(batch), -1) @ weights / 4))


def maps(batch: Array) -> Array:
    weights = np.random.default_rng(8).standard_normal((CHANNELS, 3))
    return np.asarray(np.einsum("kc,nchw->nkhw", weights, batch))


def tokens(batch: Array) -> Array:
    return np.moveaxis(maps(batch).reshape(len(batch), CHANNELS, -1), 1, 2)


FAKE = {"inception": {"maps": maps, "tokens": tokens, "avgpool": vectors}}


def scipy_fid(a: Array, b: Array) -> float:
    """The reference: Heusel's own formula, with SciPy's square root."""
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(cov_a @ cov_b)
    difference = a.mean(axis=0) - b.mean(axis=0)
    return float(difference @ difference + np.trace(cov_a + cov_b - 2 * np.real(root)))


def fid_from_features(a: Array, b: Array) -> float:
    """The same without covariances: tr (S1 S2)^(1/2) is the nuclear norm of centred A times centred B."""
    centred_a, centred_b = ((x - x.mean(axis=0)) / np.sqrt(len(x) - 1) for x in (a, b))
    cross = np.linalg.norm(centred_a @ centred_b.T, "nuc")
    traces = np.sum(centred_a**2) + np.sum(centred_b**2)
    difference = a.mean(axis=0) - b.mean(axis=0)
    return float(difference @ difference + traces - 2 * cross)


def distance(a: Array, b: Array) -> float:
    return trocar.frechet_distance(
        a.mean(axis=0), np.cov(a, rowvar=False), b.mean(axis=0), np.cov(b, rowvar=False)
    )


def test_fid_is_scipys(analyse: Analyse) -> None:
    a, b = images(60, 0), images(45, 1, shift=0.5)
    found = analyse(FakeModels(FAKE), "fid", "inception", a, b, batch_size=7)
    assert found.distance == pytest.approx(scipy_fid(vectors(a), vectors(b)), rel=1e-6)
    assert (found.count_a, found.count_b, found.channels, found.at) == (60, 45, CHANNELS, "avgpool")
    assert found.mean_term + found.covariance_term == found.distance


@pytest.mark.parametrize("at", ["maps", "tokens"])
def test_positions_are_averaged(analyse: Analyse, at: str) -> None:
    a, b = images(30, 0), images(30, 1, shift=0.5)
    found = analyse(FakeModels(FAKE), "fid", "inception", a, b, at, batch_size=8)
    assert found.distance == pytest.approx(
        scipy_fid(maps(a).mean(axis=(2, 3)), maps(b).mean(axis=(2, 3))), rel=1e-6
    )
    assert (found.count_a, found.channels) == (30, CHANNELS)


def test_features_without_positions_are_not_pooled(analyse: Analyse) -> None:
    fake = FakeModels(FAKE)
    analyse(fake, "fid", "inception", images(9, 0), images(9, 1), "avgpool")
    assert [tap.reduce for _, (tap,) in fake.streams] == [(), ()]


def test_callers_own_reductions_stay(analyse: Analyse) -> None:
    fake = FakeModels(FAKE)
    own = trocar.tap("tokens", reduce=[trocar.pool("cls")])
    analyse(fake, "fid", "inception", images(9, 0), images(9, 1), own)
    assert [tap.reduce for _, (tap,) in fake.streams] == [own.reduce, own.reduce]


def test_no_values_are_asked_for(analyse: Analyse) -> None:
    fake = FakeModels(FAKE)
    analyse(fake, "fid", "inception", images(9, 0), images(9, 1), "maps")
    assert all(not tap.values and tap.over == "channel" for _, taps in fake.streams for tap in taps)


def test_batches_may_come_from_generators(analyse: Analyse) -> None:
    a, b = images(20, 0), images(20, 1, shift=0.5)
    found = analyse(FakeModels(FAKE), "fid", "inception", (a[i : i + 6] for i in range(0, 20, 6)), iter([b]))
    assert found.distance == pytest.approx(scipy_fid(vectors(a), vectors(b)), rel=1e-6)


def test_equal_sets_have_distance_zero(analyse: Analyse) -> None:
    a = images(40, 0)
    assert analyse(FakeModels(FAKE), "fid", "inception", a, a, batch_size=16).distance == pytest.approx(
        0, abs=1e-12
    )


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_images_are_refused(analyse: Analyse, count: int) -> None:
    with pytest.raises(ValueError, match=r"empty|at least 2 samples"):
        analyse(FakeModels(FAKE), "fid", "inception", images(9, 0), images(count, 1))
    with pytest.raises(ValueError, match=r"no batch|at least 2 samples"):
        analyse(FakeModels(FAKE), "fid", "inception", images(9, 0), iter([images(count, 1)][:count]))


def test_features_that_are_not_finite_are_refused(analyse: Analyse) -> None:
    bad = images(9, 0)
    bad[4] = np.nan
    with pytest.raises(ValueError, match="images_b: the features at 'avgpool' contain NaN"):
        analyse(FakeModels(FAKE), "fid", "inception", images(9, 0), bad)


def test_a_selector_for_several_values_is_refused(analyse: Analyse) -> None:
    with pytest.raises(ValueError, match="'\\*\\*' selects 3 feature maps"):
        analyse(FakeModels(FAKE), "fid", "inception", images(9, 0), images(9, 0), "**")


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True])
def test_a_batch_size_that_is_none_is_refused(analyse: Analyse, batch_size: object) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        analyse(FakeModels(FAKE), "fid", "inception", images(9, 0), images(9, 0), batch_size=batch_size)


def test_a_batch_that_fails_is_named(analyse: Analyse) -> None:
    fake = FakeModels(FAKE, failing={("inception", 1): trocar.errors.InvalidImageError("it is damaged")})
    with pytest.raises(trocar.errors.InvalidImageError) as caught:
        analyse(fake, "fid", "inception", images(20, 0), images(20, 0), batch_size=8)
    assert caught.value.__notes__ == ["in samples 8 to 15, inception"]


@pytest.mark.parametrize(("count_a", "count_b", "channels"), [(200, 300, 12), (90, 400, 64)])
def test_frechet_distance_is_scipys_where_covariances_are_regular(
    count_a: int, count_b: int, channels: int
) -> None:
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((channels, channels))
    a = rng.standard_normal((count_a, channels)) @ mixing
    b = rng.standard_normal((count_b, channels)) @ mixing.T + 1
    assert distance(a, b) == pytest.approx(scipy_fid(a, b), rel=1e-9)


@pytest.mark.parametrize(("count_a", "count_b", "channels"), [(2, 2, 5), (10, 12, 64), (40, 500, 128)])
def test_frechet_distance_of_singular_covariances_is_that_of_the_features(
    count_a: int, count_b: int, channels: int
) -> None:
    rng = np.random.default_rng(1)
    a = rng.standard_normal((count_a, channels))
    b = rng.standard_normal((count_b, channels)) * 2 + 0.3
    assert distance(a, b) == pytest.approx(fid_from_features(a, b), rel=1e-10)
    assert distance(a, b) == pytest.approx(scipy_fid(a, b), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_frechet_distance_scales_with_the_square(scale: float) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((50, 4)), rng.standard_normal((60, 4)) + 1
    assert distance(a * scale, b * scale) == pytest.approx(distance(a, b) * scale**2, rel=1e-9)


def test_frechet_distance_of_wide_spectra_stays_close_to_the_features() -> None:
    """Variances over 12 orders of magnitude, as dead and strong channels beside each other have."""
    rng = np.random.default_rng(3)
    spread = np.logspace(-6, 0, 32)
    a, b = rng.standard_normal((500, 32)) * spread, rng.standard_normal((500, 32)) * spread[::-1]
    assert distance(a, b) == pytest.approx(fid_from_features(a, b), rel=1e-6)


def test_frechet_distance_of_diagonals_is_the_closed_form() -> None:
    found = trocar.frechet_distance([0, 0], np.diag([4.0, 0.0]), [3, 4], np.diag([1.0, 9.0]))
    assert found == pytest.approx(25 + (2 - 1) ** 2 + 9, rel=1e-14)


def test_frechet_distance_without_any_variance_is_that_of_the_means() -> None:
    assert trocar.frechet_distance([1.0], [[0.0]], [3.0], [[0.0]]) == 4.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 0], np.eye(3), [0, 0], np.eye(2)), "cov_a has shape"),
        (([0, 0], np.eye(2), [0, 0], np.ones(2)), "cov_b has shape"),
        (([0, 0], np.eye(2), [0], np.eye(2)), "must have one shape"),
        (([[0]], np.eye(1), [[0]], np.eye(1)), "must have one shape"),
        (([], np.ones((0, 0)), [], np.ones((0, 0))), "must have one shape"),
        (([np.nan], np.eye(1), [0], np.eye(1)), "NaN or infinity"),
        (([0], [[np.inf]], [0], np.eye(1)), "NaN or infinity"),
    ],
)
def test_frechet_distance_refuses_what_is_none(arguments: tuple[Array, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trocar.frechet_distance(*arguments)


def test_fid_prints_as_a_table_that_warns_of_small_sets(analyse: Analyse) -> None:
    small = analyse(FakeModels(FAKE), "fid", "inception", images(5, 0), images(900, 1, shift=0.5))
    assert small.is_singular
    assert str(small).splitlines()[-1].startswith("a set has no more images than channels")
    large = analyse(FakeModels(FAKE), "fid", "inception", images(60, 0), images(900, 1, shift=0.5))
    assert str(large).splitlines()[3:] == [
        "images              60 and 900",
        "features            6 channels at avgpool",
    ]
    assert "<td>60 and 900</td>" in large._repr_html_()
