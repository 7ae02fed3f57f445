"""Index, take, crop and top-k, against NumPy."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.reductions import (
    Axis,
    Crop,
    Gram,
    Index,
    Pool,
    PoolKind,
    Slice,
    Take,
    TokenRows,
    TopK,
    reduce_value,
    reduced_signature,
)

SHAPES = hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=5)
BOUNDS = st.none() | st.integers(-7, 7) | st.sampled_from([-(2**63), 2**63 - 1])
SLICES = st.builds(slice, BOUNDS, BOUNDS, st.none() | st.integers(1, 4) | st.just(2**63 - 1))


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).float()


def items_of(expression: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(Slice(i.start, i.stop, i.step) if isinstance(i, slice) else i for i in expression)


def refusal(value: torch.Tensor, *reductions: Any, channel_dim: int | None = None) -> str:
    with pytest.raises(ServiceError) as refused:
        reduce_value(value, reductions, channel_dim)
    assert refused.value.reason is ErrorReason.REDUCTION_REJECTED
    return refused.value.message


@given(shape=SHAPES, data=st.data())
def test_index_selects_what_numpy_does_or_refuses_where_numpy_does(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    item = SLICES | st.integers(-6, 6)
    before, after = data.draw(st.lists(item, max_size=4)), data.draw(st.lists(item, max_size=2))
    expression = (*before, ..., *after) if data.draw(st.booleans()) else (*before, *after)
    value = numbers(*shape)
    try:
        expected = value.numpy()[expression]
    except IndexError:
        refusal(value, Index(items_of(expression)))
        return
    found = reduce_value(value, [Index(items_of(expression))]).value
    np.testing.assert_array_equal(found.numpy(), expected, strict=True)


@pytest.mark.parametrize(
    ("axis", "dim", "shape"),
    [
        (Axis.SAMPLES, 0, (4, 3)),
        (Axis.CHANNELS, 1, (2, 6, 3, 3)),
        (Axis.CHANNELS, 1, (2, 6)),
        (Axis.CHANNELS, 2, (2, 3, 6)),
        (Axis.CHANNELS, 1, (2, 6, 1, 2, 2)),
        (Axis.TOKENS, 1, (2, 6, 3)),
    ],
)
@pytest.mark.parametrize("positions", [(0,), (3, -1, 0), (1, 1, 1)])
def test_take_selects_along_the_dimension_that_is_meant(
    axis: Axis, dim: int, shape: tuple[int, ...], positions: tuple[int, ...]
) -> None:
    value = numbers(*shape)
    found = reduce_value(value, [Take(axis, positions)]).value
    np.testing.assert_array_equal(found.numpy(), np.take(value.numpy(), positions, dim), strict=True)


def test_the_taps_channel_dim_says_where_channels_are_taken() -> None:
    value = numbers(2, 3, 3, 5)
    found = reduce_value(value, [Take(Axis.CHANNELS, (4,))], channel_dim=-1)
    assert torch.equal(found.value, value[..., 4:])
    assert found.channel_dim == 3


def test_channels_stay_the_channels_when_an_index_lowers_the_rank() -> None:
    value = numbers(2, 6, 4, 5)
    found = reduce_value(value, [Index((Slice(), Slice(), 0)), Take(Axis.CHANNELS, (5,))])
    assert torch.equal(found.value, value[:, 5:, 0])
    assert found.channel_dim == 1


@pytest.mark.parametrize(
    ("value", "reductions", "channel_dim"),
    [
        (numbers(2, 6, 4, 5), [Index((Slice(), 0)), Take(Axis.CHANNELS, (0,))], None),
        (numbers(2, 6, 4, 5), [Index((0,)), Take(Axis.SAMPLES, (0,))], None),
        (numbers(2, 6, 4), [Index((0,)), Take(Axis.TOKENS, (0,))], None),
        (numbers(2, 6, 4, 5), [Index((0,)), Pool(PoolKind.AVG)], None),
        (numbers(2, 6), [Take(Axis.CHANNELS, (0,))], 2),
        (numbers(2, 6), [Take(Axis.SAMPLES, (0,))], 0),
        (numbers(6), [Take(Axis.CHANNELS, (0,))], None),
        (numbers(), [Take(Axis.SAMPLES, (0,))], None),
        (numbers(2, 6, 4, 5), [Take(Axis.TOKENS, (0,))], None),
        (numbers(2, 6), [Take(Axis.CHANNELS, (0, 6))], None),
        (numbers(2, 6), [Take(Axis.CHANNELS, (-7,))], None),
        (numbers(2, 0), [Take(Axis.CHANNELS, (0,))], None),
    ],
)
def test_a_dimension_or_position_that_is_not_there_is_refused(
    value: torch.Tensor, reductions: list[Any], channel_dim: int | None
) -> None:
    assert str(reductions[-1]) in refusal(value, *reductions, channel_dim=channel_dim)


def test_rows_of_tokens_are_those_of_each_sample_and_their_filling_is_masked() -> None:
    value = numbers(2, 5, 3)
    rows = TokenRows(((1, 4, 4), (0,)), 5, (0, 0))
    found = reduce_value(value, [rows])
    assert found.own is not None
    assert torch.equal(found.value[found.own.mask], torch.cat([value[0, [1, 4, 4]], value[1, :1]]))
    assert not found.value[~found.own.mask].any()
    assert reduced_signature(value.shape, value.dtype, [rows]).value.shape == found.value.shape
    pooled = reduce_value(value, [rows, Pool(PoolKind.AVG)]).value
    assert torch.equal(pooled, torch.stack([value[0, [1, 4, 4]].mean(0), value[1, 0]]))


def test_rows_of_tokens_of_other_texts_are_refused() -> None:
    assert "the texts are 2 of 5 tokens" in refusal(numbers(2, 4, 3), TokenRows(((1,), (0,)), 5, (0, 0)))


def test_crop_is_a_rectangle_of_the_last_two_dimensions() -> None:
    value = numbers(2, 3, 6, 7)
    found = reduce_value(value, [Crop(1, 2, 5, 3)]).value
    np.testing.assert_array_equal(found.numpy(), value.numpy()[..., 1:6, 2:5], strict=True)


@pytest.mark.parametrize(
    "wanted", [Crop(0, 0, 7, 1), Crop(6, 0, 1, 1), Crop(0, 5, 1, 3), Crop(2**31, 2**31, 2**31, 2**31)]
)
def test_a_crop_beyond_the_edges_is_refused(wanted: Crop) -> None:
    assert "6 x 7" in refusal(numbers(2, 3, 6, 7), wanted)


@given(
    values=hnp.arrays(
        np.float32, hnp.array_shapes(max_dims=3, max_side=6), elements=st.floats(allow_nan=False, width=32)
    ),
    data=st.data(),
)
def test_top_k_are_the_largest_in_order_with_their_positions(
    values: np.ndarray[Any, Any], data: st.DataObject
) -> None:
    dim = data.draw(st.integers(-values.ndim, values.ndim - 1))
    k, is_smallest = data.draw(st.integers(1, values.shape[dim])), data.draw(st.booleans())
    found = reduce_value(torch.from_numpy(values), [TopK(k, dim, is_smallest)])
    ordered = np.sort(values, dim) if is_smallest else -np.sort(-values, dim)
    np.testing.assert_array_equal(found.value.numpy(), np.take(ordered, range(k), dim))
    indices = found.companions["indices"]
    assert indices.dtype == torch.int64
    np.testing.assert_array_equal(np.take_along_axis(values, indices.numpy(), dim), found.value.numpy())


def test_nan_is_the_largest_as_in_torch() -> None:
    found = reduce_value(torch.tensor([[1.0, float("nan"), float("inf")]]), [TopK(2)])
    assert found.companions["indices"].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (numbers(2, 3), TopK(4)),
        (numbers(2, 3), TopK(2**31 - 1)),
        (numbers(2, 3), TopK(1, dim=2)),
        (numbers(2, 3), TopK(1, dim=-3)),
        (numbers(), TopK(1)),
        (numbers(2, 3).bool(), TopK(1)),
        (numbers(2, 3).to(torch.complex64), TopK(1)),
    ],
)
def test_a_top_k_that_does_not_fit_is_refused(value: torch.Tensor, wanted: TopK) -> None:
    assert str(wanted) in refusal(value, wanted)


def test_nothing_comes_after_a_top_k() -> None:
    assert "last" in refusal(numbers(2, 3, 4), TopK(1), Gram())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.complex64, torch.bfloat16])
def test_selections_work_on_every_dtype(dtype: torch.dtype) -> None:
    value = numbers(2, 6, 4, 5).to(dtype)
    found = reduce_value(value, [Take(Axis.CHANNELS, (5, 0)), Crop(1, 1, 2, 2), Index((..., 0))])
    assert torch.equal(found.value, value[:, [5, 0], 1:3, 1])


def test_a_sparse_value_is_refused() -> None:
    assert "dense" in refusal(torch.eye(3).to_sparse(), Index((0,)))
