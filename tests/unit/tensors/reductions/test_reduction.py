"""Reductions check their own numbers and are plain data."""

from collections.abc import Callable

import pytest
import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.reductions import (
    Axis,
    Cast,
    Crop,
    Gram,
    Index,
    OperandSpec,
    Pca,
    Pool,
    PoolKind,
    Projection,
    Slice,
    Take,
    TopK,
    operand_specs,
)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Slice(step=0),
        lambda: Slice(step=-1),
        lambda: Index((..., 0, ...)),
        lambda: Index((0,) * 17),
        lambda: Take(Axis.CHANNELS, ()),
        lambda: Take(Axis.CHANNELS, (0,) * 65_537),
        lambda: Crop(-1, 0, 1, 1),
        lambda: Crop(0, 0, 0, 1),
        lambda: Pool(PoolKind.AVG, (0,)),
        lambda: Pool(PoolKind.AVG, (1, 1, 1, 1)),
        lambda: Pool(PoolKind.CLS, (1,)),
        lambda: Pool(PoolKind.GEM, power=0.0),
        lambda: Pool(PoolKind.GEM, power=float("nan")),
        lambda: Pool(PoolKind.GEM, power=float("inf")),
        lambda: TopK(0),
        lambda: Projection(0),
        lambda: Projection(2**31),
        lambda: Projection(1, seed=2**63),
        lambda: Pca(0, 3),
        lambda: Pca(2, 2**40),
        lambda: Pca(2, 3, torch.float16),
        lambda: Cast(torch.float32),
        lambda: Cast(torch.float16, is_per_channel=True),
    ],
)
def test_numbers_out_of_range_are_refused_when_it_is_made(make: Callable[[], object]) -> None:
    with pytest.raises(ServiceError) as refused:
        make()
    assert refused.value.reason is ErrorReason.INVALID_ARGUMENT


def test_reductions_are_equal_and_hashable_by_what_they_say() -> None:
    reductions = (Index((0, Slice(1, 2), ...)), Take(Axis.TOKENS, (1,)), Gram(), Pca(2, 3))
    assert len({reductions, (Index((0, Slice(1, 2), ...)), Take(Axis.TOKENS, (1,)), Gram(), Pca(2, 3))}) == 1


def test_constants_are_those_of_every_pca_in_order() -> None:
    specs = operand_specs([Pca(2, 3, torch.float64, has_mean=True), Gram(), Pca(1, 2)])
    assert specs == [
        OperandSpec(torch.float64, (2, 3)),
        OperandSpec(torch.float64, (3,)),
        OperandSpec(torch.float32, (1, 2)),
    ]
    assert [spec.byte_count for spec in specs] == [48, 24, 8]


@pytest.mark.parametrize(
    ("reduction", "text"),
    [
        (Index((0, Slice(1, None, 2), ...)), "index [0, 1::2, ...]"),
        (Take(Axis.CHANNELS, tuple(range(60_000))), "channels [0, 1, 2, 3, ...]"),
        (Pool(PoolKind.AVG, (2, 3)), "pool avg to 2 x 3"),
    ],
)
def test_errors_name_a_reduction_in_few_words(reduction: object, text: str) -> None:
    assert str(reduction) == text
