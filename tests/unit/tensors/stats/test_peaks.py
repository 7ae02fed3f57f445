"""The channel with the largest value, against `numpy.argmax`."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.unit.tensors.stats.oracle import Array, tensor
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.stats import Accumulator, Scope, Statistic, groups, peaks, reduce

ARGMAX = [Statistic.ARGMAX_CHANNEL]
ELEMENTS = st.integers(-2, 2).map(float) | st.sampled_from([np.nan, np.inf, -np.inf, -0.0])
ARRAYS = hnp.arrays(np.float64, hnp.array_shapes(min_dims=2, max_dims=4, max_side=4), elements=ELEMENTS)


def numpy_argmax(values: Array, channel_dim: int, scope: Scope) -> list[float]:
    """Ties and NaN are frequent in `ARRAYS`: the first of them wins."""
    if scope is Scope.ALL:
        others = tuple(dim for dim in range(values.ndim) if dim != channel_dim)
        return [float(np.argmax(values.max(axis=others)))]
    others = tuple(dim for dim in range(1, values.ndim) if dim != channel_dim)
    return [float(np.argmax(sample)) for sample in values.max(axis=others)]


def found(pieces: list[Array], channel_dim: int | None, scope: Scope) -> list[float]:
    accumulator = Accumulator(ARGMAX, scope, channel_dim)
    for piece in pieces:
        accumulator.update(tensor(piece))
    return accumulator.result().values[Statistic.ARGMAX_CHANNEL]


@given(values=ARRAYS, scope=st.sampled_from([Scope.ALL, Scope.SAMPLE]), data=st.data())
def test_any_tensor_in_any_batches_agrees_with_numpy(
    values: Array, scope: Scope, data: st.DataObject
) -> None:
    channel_dim = data.draw(st.integers(1, values.ndim - 1))
    cuts = data.draw(st.lists(st.integers(0, len(values)), max_size=3).map(sorted))
    assert found(np.split(values, cuts), channel_dim, scope) == numpy_argmax(values, channel_dim, scope)


@given(values=ARRAYS, scope=st.sampled_from([Scope.ALL, Scope.SAMPLE]))
def test_blocks_do_not_show(values: Array, scope: Scope) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peaks, "BLOCK_ELEMENTS", 5)
        patch.setattr(groups, "BLOCK_ELEMENTS", 5)
        assert found([values], 1, scope) == numpy_argmax(values, 1, scope)


def test_the_channels_may_be_dimension_0_over_everything() -> None:
    values = np.array([[1.0, 2.0], [9.0, 0.0], [3.0, 3.0]])
    assert found([values], 0, Scope.ALL) == [1.0]
    assert found([values], None, Scope.ALL) == [0.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16])
def test_every_real_dtype_has_a_largest_element(dtype: torch.dtype) -> None:
    value = torch.tensor([[0, 0, 1], [1, 0, 0]]).to(dtype)
    assert reduce(value, ARGMAX, Scope.SAMPLE).values[Statistic.ARGMAX_CHANNEL] == [2.0, 0.0]


@pytest.mark.parametrize("shape", [(0, 3), (0, 0), (2, 3, 0)])
def test_nothing_is_largest_of_no_elements(shape: tuple[int, ...]) -> None:
    assert np.isnan(found([np.empty(shape)], 1, Scope.ALL)).all()
    assert np.isnan(found([np.empty(shape)], 1, Scope.SAMPLE)).tolist() == [True] * shape[0]


def test_only_minus_infinity_is_channel_0() -> None:
    assert found([np.full((1, 3), -np.inf)], 1, Scope.ALL) == [0.0]


def test_other_channels_than_before_are_refused_and_leave_no_trace() -> None:
    accumulator = Accumulator([Statistic.MEAN, *ARGMAX])
    accumulator.update(torch.tensor([[0.0, 1.0]]))
    with pytest.raises(ServiceError, match="3 channels after 2"):
        accumulator.update(torch.ones(1, 3))
    assert accumulator.result().values == {Statistic.MEAN: [0.5], Statistic.ARGMAX_CHANNEL: [1.0]}


@pytest.mark.parametrize(
    ("shape", "scope", "channel_dim"),
    [((3,), Scope.ALL, None), ((), Scope.ALL, None), ((3,), Scope.SAMPLE, None), ((2, 3), Scope.SAMPLE, 0),
     ((2, 3), Scope.SAMPLE, -2), ((2, 3), Scope.ALL, 2), ((2, 3), Scope.CHANNEL, None)],
)  # fmt: skip
def test_a_tensor_without_such_channels_is_refused(
    shape: tuple[int, ...], scope: Scope, channel_dim: int | None
) -> None:
    with pytest.raises(ServiceError) as caught:
        reduce(torch.ones(shape), ARGMAX, scope, channel_dim)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
