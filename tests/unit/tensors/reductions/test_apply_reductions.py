"""Chains of reductions; what a plan says of them is what happens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.files.scale import count
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.reductions import (
    Axis,
    Crop,
    Gram,
    Index,
    Pca,
    Pool,
    PoolKind,
    Projection,
    Reduced,
    Reduction,
    Slice,
    Take,
    TopK,
    operand_specs,
    reduce_value,
    reduced_signature,
)

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64),
]
SMALL = st.integers(1, 4)
POSITIONS = st.lists(st.integers(-4, 3), min_size=1, max_size=4).map(tuple)
ITEMS = st.integers(-3, 2) | st.builds(Slice, st.none() | SMALL, st.none() | SMALL, st.none() | SMALL)
REDUCTIONS: st.SearchStrategy[Any] = st.one_of(
    st.builds(Index, st.lists(ITEMS, max_size=3).map(lambda items: (*items, ...))),
    st.builds(Take, st.sampled_from(Axis), POSITIONS),
    st.builds(Crop, st.integers(0, 2), st.integers(0, 2), SMALL, SMALL),
    st.builds(Pool, st.sampled_from(PoolKind)),
    st.builds(
        Pool,
        st.sampled_from([PoolKind.AVG, PoolKind.MAX, PoolKind.GEM]),
        st.lists(SMALL, min_size=1, max_size=3).map(tuple),
    ),
    st.builds(Gram, st.booleans()),
    st.builds(Projection, SMALL, st.integers(0, 9)),
    st.builds(Pca, SMALL, SMALL, st.sampled_from([torch.float32, torch.float64]), st.booleans()),
    st.builds(TopK, SMALL, st.integers(-3, 2), st.booleans()),
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=6, min_side=0, max_side=4)
CHANNEL_DIMS = st.none() | st.integers(-4, 4)


def constants_of(reductions: list[Reduction]) -> list[torch.Tensor]:
    return [torch.ones(spec.shape, dtype=spec.dtype) for spec in operand_specs(reductions)]


def signatures(found: Reduced) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in (found.value, *found.companions.values())]


def outcome(work: Callable[[], Reduced]) -> Reduced | tuple[ErrorReason, str]:
    """Return what comes, or why nothing does."""
    try:
        return work()
    except ServiceError as refused:
        return refused.reason, refused.message


@settings(max_examples=count(1500))
@given(
    shape=SHAPES,
    dtype=st.sampled_from(DTYPES),
    reductions=st.lists(REDUCTIONS, max_size=4),
    channel_dim=CHANNEL_DIMS,
)
def test_the_form_that_a_plan_says_is_the_form_that_comes(
    shape: tuple[int, ...], dtype: torch.dtype, reductions: list[Reduction], channel_dim: int | None
) -> None:
    value = torch.ones(shape, dtype=dtype)
    planned = outcome(lambda: reduced_signature(shape, dtype, reductions, channel_dim))
    found = outcome(lambda: reduce_value(value, reductions, channel_dim, constants_of(reductions)))
    if isinstance(planned, tuple) or isinstance(found, tuple):
        assert isinstance(planned, tuple)
        assert planned == found
        assert planned[0] is ErrorReason.REDUCTION_REJECTED
        return
    assert planned.value.is_meta
    assert signatures(found) == signatures(planned)
    assert (found.channel_dim, found.samples_dim) == (planned.channel_dim, planned.samples_dim)
    assert (found.extra_bytes, list(found.companions)) == (planned.extra_bytes, list(planned.companions))


@settings(max_examples=count(300))
@given(shape=SHAPES, reductions=st.lists(REDUCTIONS, min_size=1, max_size=3), channel_dim=CHANNEL_DIMS)
def test_strides_do_not_change_what_comes(
    shape: tuple[int, ...], reductions: list[Reduction], channel_dim: int | None
) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    backwards = tuple(reversed(range(value.ndim)))
    turned = value.permute(backwards).contiguous().permute(backwards)
    whole = outcome(lambda: reduce_value(value, reductions, channel_dim, constants_of(reductions)))
    found = outcome(lambda: reduce_value(turned, reductions, channel_dim, constants_of(reductions)))
    if isinstance(whole, tuple) or isinstance(found, tuple):
        assert whole == found
        return
    torch.testing.assert_close(found.value, whole.value, equal_nan=True)
    assert found.extra_bytes == whole.extra_bytes


class Allocated(TorchDispatchMode):
    """Adds up the bytes of every tensor that operators return, however short they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self.byte_count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple) else (found,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self.byte_count += tensor.untyped_storage().nbytes()
        return found


@pytest.mark.parametrize(
    "reductions",
    [
        [Pool(PoolKind.AVG, (2**15,))],
        [Pool(PoolKind.AVG, (2**15,)), Pool(PoolKind.AVG)],
        [Gram()],
        [Projection(512)],
        [Take(Axis.CHANNELS, (0,) * 65_536)] * 2,
        [Pca(1000, 1024, torch.float64, has_mean=True)],
        [TopK(7)],
    ],
)
def test_a_plan_allocates_nothing_however_large_its_result(reductions: list[Reduction]) -> None:
    with Allocated() as allocated:
        found = reduced_signature((64, 1024, 7, 7), torch.float32, reductions)
    assert allocated.byte_count <= 2 * 65_536 * 8  # the positions of the takes
    assert found.extra_bytes >= found.value.numel() * found.value.itemsize


def test_extra_bytes_count_what_is_made_large_on_the_way() -> None:
    enlarged = reduced_signature(
        (8, 64, 7, 7), torch.float32, [Pool(PoolKind.AVG, (4096,)), Pool(PoolKind.AVG)]
    )
    assert enlarged.value.shape == (8, 64)
    assert enlarged.extra_bytes >= 8 * 64 * 4096 * 4096 * 4


def test_a_result_beyond_every_device_is_refused_before_torch_counts_it() -> None:
    twice = [Pool(PoolKind.AVG, (2**31 - 1,))]
    with pytest.raises(ServiceError, match="bytes") as refused:
        reduced_signature((4096, 4096, 7, 7), torch.float32, twice)
    assert refused.value.reason is ErrorReason.REDUCTION_REJECTED


def test_reductions_are_applied_in_order() -> None:
    value = torch.arange(24.0).reshape(1, 2, 3, 4)
    found = reduce_value(value, [Take(Axis.CHANNELS, (1,)), Crop(1, 1, 2, 2), Pool(PoolKind.AVG), TopK(1)])
    assert found.value.tolist() == [[value[0, 1, 1:3, 1:3].mean().item()]]
    assert found.companions["indices"].tolist() == [[0]]


def test_no_reduction_leaves_any_value_as_it_is() -> None:
    value = torch.eye(3).to_sparse()
    assert reduce_value(value, [], channel_dim=9).value is value


def test_the_value_given_is_never_written() -> None:
    value = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    before = value.clone()
    for reduction in (Gram(True), Projection(2), Pool(PoolKind.GEM), Pool(PoolKind.MAX, (2,)), TopK(2)):
        reduce_value(value, [reduction])
    assert torch.equal(value, before)


def test_more_than_16_reductions_are_refused() -> None:
    with pytest.raises(ServiceError, match="16"):
        reduce_value(torch.ones(2, 2), [Index((...,))] * 17)


@pytest.mark.parametrize(
    "operands", [[], [torch.ones(2, 3)] * 2, [torch.ones(3, 2)], [torch.ones(2, 3).double()]]
)
def test_constants_must_be_those_announced(operands: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="operands"):
        reduce_value(torch.ones(4, 3), [Pca(2, 3)], operands=operands)


def test_it_works_inside_inference_mode() -> None:
    with torch.inference_mode():
        value = torch.ones(2, 3, 4, 4)
        for reduction in (Gram(True), Projection(2), Pool(PoolKind.GEM), Crop(0, 0, 2, 2), TopK(2)):
            assert reduce_value(value, [reduction]).value.isfinite().all()
