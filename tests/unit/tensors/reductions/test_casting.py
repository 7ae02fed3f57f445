"""Casts, against NumPy, with the error that a client really sees."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trocar._base.tensors import dequantize
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.reductions import (
    Cast,
    CastSignature,
    CastValue,
    cast_signature,
    cast_value,
    casting,
)

INT8 = Cast(torch.int8)
PER_CHANNEL = Cast(torch.int8, is_per_channel=True)
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def client_error(value: torch.Tensor, found: CastValue) -> float:
    """The largest difference between a finite value and what the client has, in float64."""
    if found.value.dtype is torch.int8:
        received = dequantize(found.value.numpy(), found.scales, found.channel_dim).astype(np.float64)
    else:
        received = found.value.double().numpy()
    exact = value.double().numpy()
    with np.errstate(invalid="ignore"):
        return float(np.abs(exact - received).max(where=np.isfinite(exact), initial=0))


def refusal(value: torch.Tensor, cast: Cast, channel_dim: int | None = None) -> str:
    with pytest.raises(ServiceError) as refused:
        cast_value(value, cast, channel_dim)
    assert refused.value.reason is ErrorReason.REDUCTION_REJECTED
    return refused.value.message


@given(values=hnp.arrays(np.float32, SHAPES, elements=st.floats(width=32)))
def test_float16_is_numpys_and_the_error_is_measured(values: Array) -> None:
    found = cast_value(torch.from_numpy(values), Cast(torch.float16))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found.value.numpy(), values.astype(np.float16))
    assert found.max_error == client_error(torch.from_numpy(values), found)
    assert (found.original_dtype, found.scales, found.channel_dim) == (torch.float32, [], None)


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_float_can_be_cast_to_a_half(dtype: torch.dtype, target: torch.dtype) -> None:
    value = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = cast_value(value, Cast(target))
    assert torch.equal(found.value, value.to(target))
    assert found.max_error == client_error(value, found)


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
)
def test_floats_of_8_bits_become_halves_exactly(dtype: torch.dtype, target: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    found = cast_value(every, Cast(target))
    np.testing.assert_array_equal(found.value.double().numpy(), every.double().numpy())
    assert (found.max_error, found.original_dtype) == (0.0, dtype)
    assert cast_signature(every.shape, dtype, Cast(target), None).dtype is target


def test_floats_of_8_bits_become_int8_as_their_float32_does() -> None:
    value = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    found, expected = cast_value(value, INT8), cast_value(value.float(), INT8)
    assert torch.equal(found.value, expected.value)
    assert (found.scales, found.max_error) == (expected.scales, expected.max_error)


def test_a_value_too_large_for_float16_makes_the_error_infinite() -> None:
    assert cast_value(torch.tensor([1.0, 65520.0]), Cast(torch.float16)).max_error == float("inf")
    assert cast_value(torch.tensor([1.0, 65504.0]), Cast(torch.float16)).max_error == 0


def test_nan_and_inf_stay_and_are_no_error() -> None:
    value = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    found = cast_value(value, Cast(torch.bfloat16))
    assert torch.equal(found.value.float().nan_to_num(7.0), value.nan_to_num(7.0))
    assert found.max_error == 0


@given(
    values=hnp.arrays(np.float64, SHAPES, elements=st.floats(-1e30, 1e30)),
    dtype=st.sampled_from(FLOATS),
    data=st.data(),
)
def test_int8_is_off_by_half_a_step_and_the_error_is_what_a_client_sees(
    values: Array, dtype: torch.dtype, data: st.DataObject
) -> None:
    limit = float(torch.finfo(dtype).max) / 2
    value = torch.from_numpy(values).clamp(-limit, limit).to(dtype)
    channel_dim = data.draw(st.none() | st.integers(0, value.ndim - 1)) if value.ndim else None
    found = cast_value(value, INT8 if channel_dim is None else PER_CHANNEL, channel_dim)
    assert (found.value.dtype, found.original_dtype, found.channel_dim) == (torch.int8, dtype, channel_dim)
    assert found.value.shape == value.shape
    assert found.max_error == client_error(value, found)
    # Half a step, float32's rounding of the scale and of the product, and what is too small for a float32.
    assert found.max_error <= max(found.scales, default=0) * 0.5001 + 1e-43


@pytest.mark.parametrize("channel_dim", [0, 1, 2, 3])
def test_each_channel_has_the_scale_of_its_largest_value(channel_dim: int) -> None:
    value = torch.randn(3, 4, 5, 2, generator=torch.Generator().manual_seed(0))
    found = cast_value(value, PER_CHANNEL, channel_dim)
    others = tuple(dim for dim in range(4) if dim != channel_dim)
    expected = (np.abs(value.double().numpy()).max(axis=others) / 127).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(found.scales, np.float32), expected)
    steps = value.double().numpy() / np.expand_dims(expected.astype(np.float64), others)
    np.testing.assert_array_equal(found.value.numpy(), np.clip(np.rint(steps), -127, 127))


def test_a_channel_of_zeros_stays_zero() -> None:
    found = cast_value(torch.tensor([[0.0, 2.0], [0.0, -2.0]]), PER_CHANNEL, 1)
    assert found.value.tolist() == [[0, 127], [0, -127]]
    assert found.scales[0] == 0


@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 1e-38])
def test_values_near_zero_make_an_honest_error(tiny: float) -> None:
    value = torch.tensor([tiny, -tiny / 2, 0.0])
    found = cast_value(value, INT8)
    assert found.max_error == client_error(value, found) <= value[0].item()


def test_int8_with_the_largest_float32_is_honest() -> None:
    value = torch.tensor([torch.finfo(torch.float32).max, 1.0])
    found = cast_value(value, INT8)
    assert found.max_error == client_error(value, found)


def test_int8_refuses_nan_and_inf_and_counts_them() -> None:
    value = torch.tensor([1.0, float("nan"), float("nan"), float("inf")])
    message = refusal(value, INT8)
    assert "2 NaN and 1 Inf" in message


def test_int8_refuses_what_float32_scales_cannot_say() -> None:
    assert "float32" in refusal(torch.tensor([1e300], dtype=torch.float64), INT8)


@pytest.mark.parametrize("cast", [Cast(torch.float16), Cast(torch.bfloat16), INT8])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_only_floats_are_cast(cast: Cast, dtype: torch.dtype) -> None:
    assert "float" in refusal(torch.zeros(2, 3, dtype=dtype), cast)
    with pytest.raises(ServiceError, match="float"):
        cast_signature((2, 3), dtype, cast, None)


@pytest.mark.parametrize("channel_dim", [None, 2, -1])
def test_a_scale_per_channel_needs_channels(channel_dim: int | None) -> None:
    assert "channel" in refusal(torch.ones(2, 3), PER_CHANNEL, channel_dim)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 50), (60, 2), (1, 3, 40), (2, 0, 3), (5, 1, 7, 3)])
@pytest.mark.parametrize("cast", [Cast(torch.float16), INT8, PER_CHANNEL])
def test_blocks_do_not_show(shape: tuple[int, ...], cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for channel_dim in range(len(shape)) if cast.is_per_channel else [None]:
        whole = cast_value(value, cast, channel_dim)
        with monkeypatch.context() as patch:
            patch.setattr(casting, "BLOCK_ELEMENTS", 8)
            parts = cast_value(value, cast, channel_dim)
        assert torch.equal(parts.value, whole.value)
        assert (parts.scales, parts.max_error) == (whole.scales, whole.max_error)


@pytest.mark.parametrize("cast", [Cast(torch.bfloat16), INT8, PER_CHANNEL])
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4, 4), (0, 3), (2, 0)])
def test_the_form_that_a_plan_says_is_the_form_that_comes(cast: Cast, shape: tuple[int, ...]) -> None:
    found = cast_value(torch.ones(shape), cast, 1)
    signature = cast_signature(shape, torch.float32, cast, 1)
    assert signature == CastSignature(
        found.value.dtype, found.value.nbytes, len(found.scales), found.value.nbytes
    )


def test_strides_do_not_show() -> None:
    value = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    turned = value.mT.contiguous().mT
    for cast, channel_dim in ((Cast(torch.float16), None), (INT8, None), (PER_CHANNEL, 2)):
        assert torch.equal(
            cast_value(turned, cast, channel_dim).value, cast_value(value, cast, channel_dim).value
        )
