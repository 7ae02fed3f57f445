"""Pools, bit-equal to the plain call of torch on the same value."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.reductions import (
    Index,
    Peak,
    Pool,
    PoolKind,
    Reduction,
    reduce_value,
    reduced_signature,
)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DIMS = {3: (1,), 4: (2, 3), 5: (2, 3, 4)}
"""What is pooled, by rank."""


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def pooled(value: torch.Tensor, *arguments: Any, channel_dim: int | None = None) -> torch.Tensor:
    return reduce_value(value, [Pool(*arguments)], channel_dim).value


def refusal(value: torch.Tensor, wanted: Reduction, channel_dim: int | None = None) -> str:
    with pytest.raises(ServiceError) as refused:
        reduce_value(value, [wanted], channel_dim)
    assert refused.value.reason is ErrorReason.REDUCTION_REJECTED
    return refused.value.message


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 3, 5, 4), (2, 3, 2, 5, 4)])
def test_pools_of_everything_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value, dims = random(*shape, dtype=dtype), DIMS[len(shape)]
    assert torch.equal(pooled(value, PoolKind.AVG), value.mean(dims))
    assert torch.equal(pooled(value, PoolKind.MAX), value.amax(dims))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [(1,), (2,), (3, 2), (5, 4), (8, 9)])
def test_pools_to_a_size_are_those_of_torch(size: tuple[int, ...], dtype: torch.dtype) -> None:
    value = random(2, 3, 5, 4, dtype=dtype)
    both = (size[0], size[-1])
    assert torch.equal(pooled(value, PoolKind.AVG, size), F.adaptive_avg_pool2d(value, both))
    assert torch.equal(pooled(value, PoolKind.MAX, size), F.adaptive_max_pool2d(value, both))


def test_tokens_are_pooled_over_tokens_and_width_stays_last() -> None:
    value = random(2, 7, 4)
    expected = F.adaptive_avg_pool1d(value.mT, 3).mT
    assert torch.equal(pooled(value, PoolKind.AVG, (3,)), expected)


def test_video_is_pooled_to_three_numbers() -> None:
    value = random(2, 3, 4, 5, 6)
    assert torch.equal(pooled(value, PoolKind.MAX, (2, 3, 4)), F.adaptive_max_pool3d(value, (2, 3, 4)))


def test_channels_in_the_last_dimension_stay_there() -> None:
    value = random(2, 5, 4, 3)
    channels_first = value.permute(0, 3, 1, 2)
    expected = F.adaptive_avg_pool2d(channels_first, 2).permute(0, 2, 3, 1)
    assert torch.equal(pooled(value, PoolKind.AVG, (2,), channel_dim=-1), expected)
    assert torch.equal(pooled(value, PoolKind.AVG, channel_dim=-1), value.mean((1, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power", [3.0, 1.0, 2.5, 6.0])
def test_gem_is_the_formula_of_its_authors(power: float, dtype: torch.dtype) -> None:
    value = random(2, 3, 5, 4, dtype=dtype)
    theirs = F.avg_pool2d(value.clamp(min=1e-6).pow(power), (5, 4)).pow(1 / power)[..., 0, 0]
    torch.testing.assert_close(pooled(value, PoolKind.GEM, (), power), theirs)
    exact = np.power(np.power(np.maximum(value.double().numpy(), 1e-6), power).mean((2, 3)), 1 / power)
    np.testing.assert_allclose(pooled(value, PoolKind.GEM, (), power).double(), exact, rtol=1e-5)


def test_gem_to_a_size_pools_the_powers() -> None:
    value = random(2, 3, 5, 4)
    expected = F.adaptive_avg_pool2d(value.clamp(min=1e-6).pow(3.0), 2).pow(1 / 3.0)
    assert torch.equal(pooled(value, PoolKind.GEM, (2,)), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gem_of_a_half_does_not_leave_its_range(dtype: torch.dtype) -> None:
    value = torch.full((1, 1, 2, 2), 100.0, dtype=dtype)  # its third power is above float16's largest
    found = pooled(value, PoolKind.GEM)
    assert found.dtype == dtype
    assert found.item() == 100


def test_cls_is_the_first_token() -> None:
    value = random(2, 5, 3)
    found = reduce_value(value, [Pool(PoolKind.CLS)])
    assert torch.equal(found.value, value[:, 0])
    assert (found.channel_dim, found.samples_dim) == (1, 0)


@pytest.mark.parametrize("kind", [PoolKind.AVG, PoolKind.MAX, PoolKind.GEM])
@pytest.mark.parametrize("size", [(), (2,)])
def test_nan_shows(kind: PoolKind, size: tuple[int, ...]) -> None:
    value = torch.full((1, 1, 2, 2), float("nan"))
    assert pooled(value, kind, size).isnan().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_the_largest_of_integers_is_found(dtype: torch.dtype) -> None:
    value = (random(2, 3, 4, 4) > 0).to(dtype)
    assert torch.equal(pooled(value, PoolKind.MAX), value.amax((2, 3)))


@pytest.mark.parametrize(
    "wanted", [Pool(PoolKind.AVG), Pool(PoolKind.GEM), Pool(PoolKind.MAX, (2,)), Pool(PoolKind.AVG, (2,))]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_means_of_other_than_floats_are_refused(wanted: Pool, dtype: torch.dtype) -> None:
    assert "float32" in refusal(torch.zeros(2, 3, 4, 4, dtype=dtype), wanted)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (random(2, 3), Pool(PoolKind.AVG)),
        (random(3), Pool(PoolKind.AVG)),
        (random(), Pool(PoolKind.MAX)),
        (torch.empty(2, 3, 0, 4), Pool(PoolKind.AVG)),
        (torch.empty(2, 3, 0, 4), Pool(PoolKind.MAX, (2,))),
        (random(2, 3, 4, 4), Pool(PoolKind.CLS)),
        (torch.empty(2, 0, 4), Pool(PoolKind.CLS)),
        (random(2, 3, 4, 4), Pool(PoolKind.AVG, (2, 2, 2))),
        (random(2, 3, 4), Pool(PoolKind.AVG, (2, 2))),
        (random(2, 3, 4, 4, 4), Pool(PoolKind.AVG, (2, 2))),
        (random(1, 1, 2, 2, 2, 2), Pool(PoolKind.AVG, (1,))),
        (random(2, 3, 4, 4), Pool(PoolKind.AVG, (2**31 - 1,))),
        (torch.zeros(1, 2, 3, 3, dtype=torch.complex64), Pool(PoolKind.MAX)),
    ],
)
def test_a_pool_that_does_not_fit_is_refused(value: torch.Tensor, wanted: Pool) -> None:
    assert str(tuple(value.shape)) in refusal(value, wanted)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 0, 4, 4)])
@pytest.mark.parametrize("kind", [PoolKind.AVG, PoolKind.MAX, PoolKind.GEM])
def test_no_sample_or_no_channel_gives_an_empty_result(shape: tuple[int, ...], kind: PoolKind) -> None:
    assert pooled(torch.empty(shape), kind).shape == shape[:2]
    assert pooled(torch.empty(shape), kind, (2, 3)).shape == (*shape[:2], 2, 3)


@pytest.mark.parametrize("view", [lambda v: v.to(memory_format=torch.channels_last), lambda v: v[..., ::2]])
def test_strides_do_not_matter(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    value = view(random(2, 3, 6, 6))
    torch.testing.assert_close(
        pooled(value, PoolKind.AVG, (2,)), F.adaptive_avg_pool2d(value.contiguous(), 2)
    )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32])
@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 3, 5, 4), (2, 3, 2, 5, 4)])
def test_peaks_are_the_maxima_of_torch_and_their_positions(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    value, dims = (random(*shape) * 100).to(dtype), DIMS[len(shape)]
    found = reduce_value(value, [Peak()])
    assert torch.equal(found.value, value.amax(dims))
    channels = 2 if len(shape) == 3 else 1
    rows = value.movedim(channels, 1).flatten(2)
    assert torch.equal(rows.gather(2, found.companions["indices"][..., None])[..., 0], found.value)
    assert (found.samples_dim, found.channel_dim) == (0, 1)
    planned = reduced_signature(shape, dtype, [Peak()])
    assert (planned.value.shape, planned.value.dtype) == (found.value.shape, dtype)
    assert planned.companions["indices"].shape == found.companions["indices"].shape


def test_peaks_of_other_channels_are_numbered_through_the_other_dimensions() -> None:
    value = torch.zeros(1, 2, 3, 4)
    value[0, 1, 2, 3] = 1
    found = reduce_value(value, [Peak()], channel_dim=-1)
    assert found.companions["indices"][0].tolist() == [0, 0, 0, 5]


def test_a_peak_without_positions_is_refused() -> None:
    assert "no positions" in refusal(random(2, 5), Peak())
    assert "no positions" in refusal(random(2, 5, 0, 3), Peak())
    assert "real numbers" in refusal(random(2, 5, 3).to(torch.complex64), Peak())


def test_a_peak_is_the_last_reduction() -> None:
    with pytest.raises(ServiceError, match="a peak must be the last reduction"):
        reduce_value(random(2, 5, 3, 3), [Peak(), Index((0,))])
