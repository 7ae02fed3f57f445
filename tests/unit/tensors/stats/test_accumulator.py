"""Statistics over many tensors must be those of the tensors put together."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.unit.tensors.stats.oracle import PLAIN, Array, assert_same, expected, without_underflow
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.stats import Accumulator, Scope, Statistic, reduce

FINITE = st.floats(-1e6, 1e6).map(without_underflow)
ELEMENTS = FINITE | st.sampled_from([np.nan, np.inf, -np.inf, 0.0])
BATCHES = hnp.arrays(
    np.float64, st.tuples(st.integers(0, 6), st.just(3), st.integers(1, 3)), elements=ELEMENTS
)
SCOPES = st.sampled_from(Scope)


def fed(batches: list[Array], scope: Scope) -> Accumulator:
    accumulator = Accumulator(PLAIN, scope, channel_dim=1)
    for batch in batches:
        accumulator.update(torch.from_numpy(batch))
    return accumulator


def split(values: Array, data: st.DataObject) -> list[Array]:
    cuts = data.draw(st.lists(st.integers(0, len(values)), max_size=4).map(sorted))
    return np.split(values, cuts)


@given(values=BATCHES, scope=SCOPES, data=st.data())
def test_updates_are_the_same_as_one_tensor(values: Array, scope: Scope, data: st.DataObject) -> None:
    ours = fed(split(values, data), scope).result()
    assert_same(ours.values, expected(values, scope), values)


@given(values=BATCHES, scope=SCOPES, data=st.data())
def test_merging_is_associative(values: Array, scope: Scope, data: st.DataObject) -> None:
    first, second, third = np.split(values, sorted(data.draw(st.tuples(*[st.integers(0, len(values))] * 2))))
    left = fed([first], scope)
    left.merge(fed([second], scope))
    left.merge(fed([third], scope))
    tail = fed([second], scope)
    tail.merge(fed([third], scope))
    right = fed([first], scope)
    right.merge(tail)
    assert_same(left.result().values, right.result().values, values)
    assert_same(left.result().values, expected(values, scope), values)


@pytest.mark.parametrize(("first", "second", "mean"), [(np.inf, 1.0, np.inf), (np.inf, -np.inf, np.nan)])
def test_infinities_meet_across_a_merge(first: float, second: float, mean: float) -> None:
    result = fed([np.full((1, 3, 1), first), np.full((1, 3, 1), second)], Scope.ALL).result()
    assert result.values[Statistic.MEAN] == pytest.approx([mean], nan_ok=True)
    assert np.isnan(result.values[Statistic.VAR]).all()


@pytest.mark.parametrize("scope", Scope)
def test_without_any_tensor_there_is_nothing(scope: Scope) -> None:
    empty = Accumulator(PLAIN, scope)
    groups = np.empty((0, 0))
    assert_same(empty.result().values, expected(groups, scope), groups)


@pytest.mark.parametrize("scope", Scope)
def test_merging_with_an_unused_accumulator_changes_nothing(scope: Scope) -> None:
    value = torch.arange(12.0).reshape(2, 3, 2)
    used, unused = Accumulator(PLAIN, scope, 1), Accumulator(PLAIN, scope, 1)
    used.update(value)
    used.merge(Accumulator(PLAIN, scope, 1))
    unused.merge(used)
    assert used.result() == unused.result() == reduce(value, PLAIN, scope, 1)


def test_tensors_may_differ_in_shape_but_not_in_channels() -> None:
    accumulator = Accumulator([Statistic.MEAN], Scope.CHANNEL)
    accumulator.update(torch.ones(2, 3, 4, 4))
    accumulator.update(torch.full((1, 3, 8, 4), 2.0))
    assert accumulator.result().values[Statistic.MEAN] == [1.5] * 3
    with pytest.raises(ServiceError, match="4 channels in dimension 1 after 3") as caught:
        accumulator.update(torch.ones(2, 4, 4, 4))
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


def test_accumulators_of_other_statistics_do_not_merge() -> None:
    with pytest.raises(ServiceError) as caught:
        Accumulator([Statistic.MEAN]).merge(Accumulator([Statistic.STD]))
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
