"""Statistics of a reply, as arrays and objects, and what breaks the contract."""

from typing import Any

import numpy as np
import pytest

import trocar
from trocar._wire.from_wire import statistics
from trocar_api.v1 import extraction_pb2, tensor_pb2
from trocar_api.v1 import statistics_pb2 as pb

SHAPE = (2, 3, 4)


def converted(*entries: pb.StatisticResult, over: str = "all") -> trocar.Statistics:
    message = extraction_pb2.FeatureMap(
        name="x",
        tensor=tensor_pb2.TensorSpec(shape=SHAPE),
        statistics=entries,
        scope=pb.StatisticScope.Value(f"STATISTIC_SCOPE_{over.upper()}"),
        channel_dim=1 if over == "channel" else None,
    )
    return statistics(message)


def entry(name: str, values: Any, **fields: Any) -> pb.StatisticResult:
    statistic = pb.Statistic.Value(f"STATISTIC_{name.upper()}")
    return pb.StatisticResult(statistic=statistic, values=values, **fields)


@pytest.mark.parametrize(("over", "shape"), [("all", (2,)), ("sample", (2, 2)), ("channel", (3, 2))])
def test_quantiles_have_a_row_for_each_group(over: str, shape: tuple[int, ...]) -> None:
    numbers = np.arange(np.prod(shape), dtype=np.float64)
    found = converted(entry("quantiles", numbers, rank_error=0.25), over=over)
    np.testing.assert_array_equal(found.quantiles, numbers.reshape(shape))
    assert found.rank_error == 0.25


@pytest.mark.parametrize(("over", "shape"), [("all", (2,)), ("sample", (2, 2)), ("channel", (3, 2))])
def test_a_histogram_has_whole_counts_and_edges(over: str, shape: tuple[int, ...]) -> None:
    numbers = np.arange(np.prod(shape), dtype=np.float64)
    found = converted(entry("histogram", numbers, edges=[0.0, 0.5, 2.0]), over=over).histogram
    assert found.counts.dtype == np.int64
    np.testing.assert_array_equal(found.counts, numbers.reshape(shape))
    np.testing.assert_array_equal(found.edges, [0.0, 0.5, 2.0])


def test_counts_and_channels_over_all_are_ints_but_nan() -> None:
    found = converted(entry("count", [24.0]), entry("argmax_channel", [2.0]))
    assert (type(found.count), type(found.argmax_channel)) == (int, int)
    assert np.isnan(converted(entry("argmax_channel", [np.nan])).argmax_channel)


def test_a_covariance_comes_from_elsewhere() -> None:
    assert converted(entry("mean", [1.0]), entry("covariance", [])).as_dict() == {"mean": 1.0}


@pytest.mark.parametrize(
    ("wrong", "over"),
    [
        (entry("mean", [1.0, 2.0]), "all"),
        (entry("count", []), "all"),
        (entry("quantiles", [1.0] * 4), "channel"),
        (entry("histogram", [1.0, 2.0], edges=[0.0, 1.0]), "all"),
        (entry("histogram", [1.0, 2.0], edges=[0.0, 1.0, 2.0]), "channel"),
        (entry("histogram", []), "all"),
        (entry("histogram", [np.nan], edges=[0.0, 1.0]), "all"),
        (entry("histogram", [np.inf], edges=[0.0, 1.0]), "all"),
    ],
)
def test_another_count_of_numbers_breaks_the_contract(wrong: pb.StatisticResult, over: str) -> None:
    with pytest.raises(trocar.BadReplyError, match="'x'"):
        converted(wrong, over=over)
