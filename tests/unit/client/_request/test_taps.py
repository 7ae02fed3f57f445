from collections.abc import Callable
from typing import Any

import pytest

import trocar
from trocar._request.taps import SCOPES, STATISTICS
from trocar_api.v1 import statistics_pb2 as pb
from trocar_api.v1 import tap_pb2


def test_the_tables_cover_the_contract() -> None:
    assert sorted(STATISTICS.values()) == sorted(set(pb.Statistic.values()) - {0})
    assert sorted(SCOPES.values()) == sorted(set(pb.StatisticScope.values()) - {0})
    for name, number in STATISTICS.items():
        assert pb.Statistic.Name(number) == f"STATISTIC_{name.upper()}"


def test_every_statistic_is_an_attribute_of_the_result() -> None:
    assert STATISTICS.keys() <= trocar.Statistics.__annotations__.keys()


@pytest.mark.parametrize(
    "options", [{"stats": ["median"]}, {"over": "pixel"}, {"channel_dim": 1}, {"stats": "avg"}]
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"median|pixel|channel_dim|avg"):
        trocar.tap("layer4", **options)


def test_one_statistic_may_be_given_as_a_string() -> None:
    assert trocar.tap("layer4", stats="mean").stats == ("mean",)


def wire(*stats: Any, **options: Any) -> tap_pb2.Tap:
    return trocar.tap("layer4", stats=stats, **options).to_wire()


def test_a_statistic_with_options_says_them_on_the_wire() -> None:
    message = wire("mean", trocar.quantiles(0.05, 0.95), trocar.histogram(bins=32))
    assert list(message.statistics) == [
        pb.STATISTIC_MEAN,
        pb.STATISTIC_QUANTILES,
        pb.STATISTIC_HISTOGRAM,
    ]
    assert list(message.quantiles) == [0.05, 0.95]
    assert message.histogram == pb.Histogram(bin_count=32)
    assert wire(trocar.histogram([0, 1, 4])).histogram == pb.Histogram(edges=[0.0, 1.0, 4.0])


def test_plain_names_have_usual_options() -> None:
    message = wire("quantiles", "histogram")
    assert list(message.quantiles) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert message.histogram == pb.Histogram(bin_count=64)


def test_other_statistics_send_no_options() -> None:
    message = wire("mean", "l1")
    assert not message.quantiles
    assert not message.HasField("histogram")


def test_one_statistic_with_options_may_stand_alone() -> None:
    assert trocar.tap("layer4", stats=trocar.quantiles(0.5)).names == ("quantiles",)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (trocar.quantiles, "0 quantiles"),
        (lambda: trocar.quantiles(0.5, 1.5), "1.5 is not between"),
        (lambda: trocar.quantiles(float("nan")), "nan is not between"),
        (lambda: trocar.quantiles(*[0.5] * 1025), "1 to 1024"),
        (lambda: trocar.histogram([0.0, 1.0], bins=3), "give one of them"),
        (lambda: trocar.histogram(bins=0), "0 bins"),
        (lambda: trocar.histogram(bins=65_537), "1 to 65536"),
        (lambda: trocar.histogram([]), "no edges"),
        (lambda: trocar.histogram([1.0]), "1 edges"),
        (lambda: trocar.histogram([1.0, 1.0]), "ascend"),
        (lambda: trocar.histogram([0.0, float("inf")]), "finite"),
        (lambda: wire("quantiles", trocar.quantiles(0.5)), "requested twice"),
        (lambda: wire(trocar.histogram(bins=3), trocar.histogram(bins=4)), "requested twice"),
        (lambda: wire("covariance"), 'over="channel"'),
        (lambda: wire("argmax_channel", over="channel"), "argmax_channel"),
    ],
)
def test_impossible_options_are_refused_at_once(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_the_strongest_channel_may_be_sought_along_any_dimension() -> None:
    assert wire("argmax_channel", channel_dim=-1).channel_dim == -1
