import numpy as np
import pytest

import trocar


def test_a_statistic_that_was_not_requested_names_those_that_were() -> None:
    stats = trocar.Statistics({"mean": 1.0, "std": 2.0})
    with pytest.raises(AttributeError, match="no statistic 'max' here; requested: mean, std"):
        _ = stats.max


def test_the_repr_shows_numbers_and_shapes() -> None:
    assert repr(trocar.Statistics({"mean": 1.5})) == "Statistics(mean=1.5)"
    assert repr(trocar.Statistics({"std": np.zeros(3)}, over="channel")) == (
        "Statistics(std=array(3,), over='channel')"
    )


def test_statistics_are_read_only() -> None:
    stats = trocar.Statistics({"mean": 1.0})
    with pytest.raises(AttributeError, match="read-only"):
        stats.mean = 2.0


def test_equal_numbers_are_equal_statistics_nan_included() -> None:
    assert trocar.Statistics({"mean": float("nan")}) == trocar.Statistics({"mean": float("nan")})
    assert trocar.Statistics({"mean": 1.0}) != trocar.Statistics({"std": 1.0})


def histogram(*counts: int) -> trocar.Histogram:
    return trocar.Histogram(np.array(counts), np.arange(len(counts) + 1.0))


def test_histograms_are_compared_and_shown() -> None:
    stats = trocar.Statistics({"histogram": histogram(3, 4)})
    assert stats == trocar.Statistics({"histogram": histogram(3, 4)})
    assert stats != trocar.Statistics({"histogram": histogram(3, 5)})
    assert stats != trocar.Statistics({"histogram": 3.0})
    assert repr(stats) == "Statistics(histogram=2 bins)"
    assert repr(stats.histogram) == "Histogram(counts=array(2,), edges=0 to 2)"


def test_a_covariance_is_a_statistic_like_others() -> None:
    stats = trocar.Statistics({"mean": 1.0}, covariance=np.eye(2))
    assert list(stats.as_dict()) == ["mean", "covariance"]
    assert stats.covariance.shape == (2, 2)
    assert stats.rank_error == 0.0
