"""Reductions of padded tokens: each sample gets the numbers that it has without its padding.

The padding of these values is NaN or far larger than the rest, so that it is seen in every result.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trocar_server.tensors.reductions import (
    Axis,
    Crop,
    Gram,
    Index,
    Peak,
    Pool,
    PoolKind,
    Reduced,
    Reduction,
    Slice,
    Take,
    TokenRows,
    TopK,
    reduce_value,
)
from trocar_server.tensors.reductions.padding import Own, unpadded

ALL = Slice()
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]).bool()
"""Padded on the right, not, and on the left."""
SIZES = [PoolKind.AVG, PoolKind.MAX, PoolKind.GEM]


def padded(dtype: torch.dtype = torch.float32, filling: float = math.nan) -> torch.Tensor:
    value = torch.randn((3, 5, 4), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return value.masked_fill(~MASK[:, :, None], filling).to(dtype)


def reduced(*reductions: Reduction, filling: float = math.nan) -> Reduced:
    return reduce_value(padded(filling=filling), reductions, own=Own((0, 1), MASK))


def alone(reductions: Sequence[Reduction]) -> list[torch.Tensor]:
    """What the reductions leave of each sample, a batch of one without padding."""
    return [
        reduce_value(own[kept][None], reductions).value[0] for own, kept in zip(padded(), MASK, strict=True)
    ]


def mask_of(found: Reduced) -> torch.Tensor | None:
    """The mask of what is left of a value."""
    return None if found.own is None else found.own.mask


def counted(found: Reduced, *, by_sample: bool = False) -> list[torch.Tensor]:
    """The elements that statistics count."""
    return [part.flatten() for part in unpadded(found.value, mask_of(found), by_sample=by_sample)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pools_to_a_size_are_those_of_torch_of_each_samples_own_tokens(dtype: torch.dtype, size: int) -> None:
    value = padded(dtype)
    own = [value[i, MASK[i]].T[None] for i in range(3)]
    for kind, function in ((PoolKind.AVG, F.adaptive_avg_pool1d), (PoolKind.MAX, F.adaptive_max_pool1d)):
        found = reduce_value(value, [Pool(kind, (size,))], own=Own((0, 1), MASK))
        assert torch.equal(found.value, torch.stack([function(tokens, size)[0].T for tokens in own]))
        assert found.value.dtype == dtype
        assert found.own is None


@pytest.mark.parametrize("kind", SIZES)
def test_a_pool_to_one_token_is_the_pool_of_everything(kind: PoolKind) -> None:
    found = reduced(Pool(kind, (1,))).value
    torch.testing.assert_close(found[:, 0], reduced(Pool(kind)).value)


@pytest.mark.parametrize(
    "following",
    [Gram(), Gram(is_normalized=True), Pool(PoolKind.LAST), Pool(PoolKind.AVG), Take(Axis.TOKENS, (1,))],
)
@pytest.mark.parametrize("kind", SIZES)
def test_what_follows_a_pool_to_a_size_counts_all_its_tokens(kind: PoolKind, following: Any) -> None:
    steps = [Pool(kind, (2,)), following]
    torch.testing.assert_close(reduced(*steps).value, torch.stack(alone(steps)))


def test_a_sample_that_is_all_padding_is_pooled_to_what_a_pool_of_everything_makes_of_it() -> None:
    mask = MASK.clone()
    mask[0] = False
    for kind in SIZES:
        whole = reduce_value(padded(), [Pool(kind)], own=Own((0, 1), mask)).value
        sized = reduce_value(padded(), [Pool(kind, (2,))], own=Own((0, 1), mask)).value
        torch.testing.assert_close(sized[0], whole[0].expand(2, 4), equal_nan=True)
        assert sized[1:].isfinite().all()


def test_gradients_of_pools_to_a_size_leave_padding_out() -> None:
    value = padded(torch.float64, filling=9.0).requires_grad_()
    reduce_value(value, [Pool(PoolKind.AVG, (2,))], own=Own((0, 1), MASK)).value.square().sum().backward()
    assert value.grad is not None
    for i in range(3):
        own = value[i, MASK[i]].detach().requires_grad_()
        F.adaptive_avg_pool1d(own.T[None], 2).square().sum().backward()
        torch.testing.assert_close(value.grad[i, MASK[i]], own.grad)
    assert not value.grad[~MASK].any()


@pytest.mark.parametrize("by_sample", [False, True])
def test_an_integer_on_the_width_counts_as_a_slice_of_one_does(by_sample: bool) -> None:
    found = counted(reduced(Index((ALL, ALL, 3))), by_sample=by_sample)
    expected = counted(reduced(Take(Axis.CHANNELS, (3,))), by_sample=by_sample)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()


@pytest.mark.parametrize("sample", [0, 1, 2, -1])
def test_an_integer_on_the_samples_leaves_that_samples_own_tokens(sample: int) -> None:
    found = reduced(Index((sample,)))
    (part,) = unpadded(found.value, mask_of(found), by_sample=False)
    assert torch.equal(part, padded()[sample, MASK[sample]])
    assert found.channel_dim == 1  # also of the part: statistics over channels use it


@pytest.mark.parametrize("token", [0, 3, -1])
def test_an_integer_on_the_tokens_leaves_the_samples_that_have_one_there(token: int) -> None:
    found = reduced(Index((ALL, token)))
    (part,) = unpadded(found.value, mask_of(found), by_sample=False)
    assert torch.equal(part, padded()[MASK[:, token], token])
    own = unpadded(found.value, mask_of(found), by_sample=True)
    assert [one.shape for one in own] == [(1, 4, int(kept)) for kept in MASK[:, token]]  # channels stay at 1
    wanted = counted(reduced(Take(Axis.TOKENS, (token,))), by_sample=True)
    assert all(torch.equal(one.flatten(), other) for one, other in zip(own, wanted, strict=True))


def test_integers_on_samples_and_tokens_leave_one_token_or_none() -> None:
    for sample, token in ((0, 1), (0, 4)):
        found = reduced(Index((sample, token)))
        (part,) = unpadded(found.value, mask_of(found), by_sample=False)
        assert torch.equal(part.flatten(), padded()[sample, token][MASK[sample, token].expand(4)])
        assert part.shape[0] == 4  # the channels


def test_later_selections_keep_the_mask_that_an_integer_left() -> None:
    found = reduced(Index((ALL, ALL, 2)), Index((Slice(0, 2), Slice(1, 4))), Take(Axis.SAMPLES, (1, 0)))
    assert found.own is not None
    assert torch.equal(found.own.mask, MASK[:2, 1:4][[1, 0]])
    found = reduced(Index((2,)), Take(Axis.CHANNELS, (3, 0)), Crop(2, 0, 3, 2))
    assert found.own is not None
    assert torch.equal(found.own.mask, MASK[2, 2:])
    assert torch.equal(found.value[found.own.mask], padded()[2, 3:][:, [3, 0]])


def test_a_gram_matrix_of_one_position_leaves_out_samples_without_a_token_there() -> None:
    assert torch.equal(reduced(Index((ALL, 3)), Gram()).value, reduced(Take(Axis.TOKENS, (3,)), Gram()).value)


@pytest.mark.parametrize("is_smallest", [False, True])
@pytest.mark.parametrize("filling", [math.nan, math.inf, -math.inf, 1e9, -1e9])
def test_padding_is_not_among_the_top_tokens(filling: float, is_smallest: bool) -> None:
    found = reduced(TopK(2, 1, is_smallest), filling=filling)
    expected = [
        own[kept].topk(2, 0, largest=not is_smallest) for own, kept in zip(padded(), MASK, strict=True)
    ]
    assert torch.equal(found.value, torch.stack([top.values for top in expected]))
    first = MASK.int().argmax(1)  # positions are those of the padded batch
    places = torch.stack([top.indices + start for top, start in zip(expected, first, strict=True)])
    assert torch.equal(found.companions["indices"], places)


def test_top_tokens_that_a_sample_does_not_have_are_zeros_that_are_not_counted() -> None:
    found = reduced(TopK(4, 1))
    own = [value[kept].sort(0, descending=True).values for value, kept in zip(padded(), MASK, strict=True)]
    for i, values in enumerate(own):
        count = min(len(values), 4)
        assert torch.equal(found.value[i, :count], values[:4])
        assert not found.value[i, count:].any()
        assert (found.companions["indices"][i, count:] == -1).all()
        assert torch.equal(counted(found, by_sample=True)[i], values[:4].flatten())


def test_padding_is_not_among_the_top_samples() -> None:
    found = reduced(TopK(2, 0))
    assert found.own is not None
    for token in range(5):
        own = padded()[MASK[:, token], token].sort(0, descending=True).values[:2]
        assert torch.equal(found.value[found.own.mask[:, token], token], own)


def test_top_channels_keep_their_mask() -> None:
    found = reduced(TopK(2, -1))
    assert torch.equal(counted(found)[0], padded()[MASK].topk(2).values.flatten())


def test_own_numbers_beyond_all_others_win_against_padding() -> None:
    value = torch.tensor([[-math.inf, 5.0], [math.nan, 5.0], [0.0, 5.0]])[:, :, None]
    mask = torch.tensor([[True, False]] * 3)
    for is_smallest in (False, True):
        found = reduce_value(value, [TopK(1, 1, is_smallest)], own=Own((0, 1), mask)).value.flatten()
        np.testing.assert_array_equal(found.numpy(), value[:, 0, 0].numpy())


def full(dtype: torch.dtype, *rows: Sequence[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).to(dtype)[:, :, None]


INF, NAN = math.inf, math.nan
TIED = [
    (full(torch.float32, [9, 5, -INF, -INF], [-INF, -INF, -INF, 9]), False),
    (full(torch.float16, [NAN, 5, NAN, NAN], [NAN, NAN, 3, NAN]), True),
    (full(torch.uint8, [7, 5, 0, 0], [0, 0, 0, 7]), False),
    (full(torch.uint8, [7, 255, 255, 3], [255, 255, 255, 7]), True),
]
"""Own elements that come last in the order, and whether it is that of a smallest k."""


@pytest.mark.parametrize(("value", "is_smallest"), TIED)
@pytest.mark.parametrize("dim", [0, 1])
def test_padding_is_not_selected_where_own_elements_are_last_in_the_order(
    value: torch.Tensor, is_smallest: bool, dim: int
) -> None:
    mask = torch.tensor([[False, True, True, True], [True, True, True, False]])
    if dim == 0:
        value, mask = value.movedim(0, 1), mask.T
    found = reduce_value(value, [TopK(3, dim, is_smallest)], own=Own((0, 1), mask))
    values, indices = (each.movedim(dim, 1)[:, :, 0] for each in (found.value, found.companions["indices"]))
    for own, is_own, got, places in zip(
        value.movedim(dim, 1)[:, :, 0], mask.movedim(dim, 1), values, indices, strict=True
    ):
        expected = sorted(own[is_own].tolist(), key=lambda each: (math.isnan(each), each))
        expected = expected if is_smallest else expected[::-1]
        np.testing.assert_array_equal(got.tolist(), expected)
        np.testing.assert_array_equal(own[places].tolist(), expected)
        assert sorted(places.tolist()) == is_own.nonzero().flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
def test_padding_is_not_among_the_top_integers(dtype: torch.dtype) -> None:
    value = torch.tensor([[3, 7, 100], [9, 1, 2]], dtype=dtype)[:, :, None]
    mask = torch.tensor([[True, True, False], [False, True, True]])
    assert reduce_value(value, [TopK(2, 1)], own=Own((0, 1), mask)).value.tolist() == [[[7], [3]], [[2], [1]]]
    assert reduce_value(value, [TopK(2, 1, True)], own=Own((0, 1), mask)).value.tolist() == [
        [[3], [7]],
        [[1], [2]],
    ]


def test_the_filling_of_rows_is_not_among_the_top_tokens() -> None:
    value = -torch.rand((2, 5, 3)) - 1
    found = reduce_value(value, [TokenRows(((1, 2, 4), (0,)), 5, (0, 0)), TopK(1, 1)]).value
    assert torch.equal(found[:, 0], torch.stack([value[0, [1, 2, 4]].amax(0), value[1, 0]]))


def test_padding_has_no_peak() -> None:
    found = reduce_value(padded(filling=1e9), [Peak()], own=Own((0, 1), MASK))
    for sample, kept in enumerate(MASK):
        own = padded()[sample].masked_fill(~kept[:, None], -torch.inf)
        assert torch.equal(found.value[sample], own.amax(0))
        assert torch.equal(found.companions["indices"][sample], own.argmax(0))
