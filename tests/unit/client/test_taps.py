from typing import Any

import pytest

import trocar
from trocar._taps import SCOPES, STATISTICS
from trocar_api.v1 import statistics_pb2 as pb


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
