import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trocar_server.spool.files.encoding import Encoding, EncodingOptions, Kind, StoreDtype

SIZES = [1, 7, 8, 9, 4096, 32_000, 32_001, 100_003]


def bytes_of(values: torch.Tensor) -> memoryview:
    return memoryview(bytearray(values.contiguous().view(torch.uint8).numpy().tobytes()))


def there_and_back(values: torch.Tensor, options: EncodingOptions) -> tuple[Encoding, bytes, torch.Tensor]:
    source = bytes_of(values)
    encoding = options.choose(source, values.dtype)
    stored = memoryview(bytearray(encoding.stored_bytes(source.nbytes)))
    assert encoding.encode(source, stored) == stored.nbytes
    target = memoryview(bytearray(source.nbytes))
    encoding.decode(stored, target)
    return encoding, bytes(stored), torch.frombuffer(target, dtype=values.dtype)


@pytest.mark.parametrize("count", SIZES)
def test_booleans_are_bits_as_numpy_packs_them(count: int) -> None:
    values = torch.rand(count) < 0.5
    encoding, stored, back = there_and_back(values, EncodingOptions())
    assert encoding.kind is Kind.BITS
    assert stored == np.packbits(values.numpy()).tobytes()
    assert torch.equal(back, values)
    assert not encoding.is_lossy


def test_booleans_that_are_other_bytes_stay_bytes() -> None:
    odd = torch.tensor([0, 1, 2, 255], dtype=torch.uint8)
    encoding, stored, _ = there_and_back(odd.view(torch.bool), EncodingOptions())
    assert encoding.kind is Kind.RAW
    assert stored == bytes([0, 1, 2, 255])


def test_bits_can_be_switched_off() -> None:
    encoding, _, _ = there_and_back(torch.ones(9, dtype=torch.bool), EncodingOptions(bits=False))
    assert encoding.kind is Kind.RAW


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", SIZES)
def test_bf16_is_what_torch_rounds_to(count: int, dtype: torch.dtype) -> None:
    values = torch.randn(count, dtype=dtype) * 1e3
    values[0] = float("inf")
    encoding, stored, back = there_and_back(values, EncodingOptions("bf16"))
    assert encoding.kind is Kind.BF16
    assert len(stored) == 2 * count
    assert torch.equal(back, values.to(torch.bfloat16).to(dtype))


def test_bf16_keeps_nan() -> None:
    _, _, back = there_and_back(torch.tensor([1.0, float("nan"), -float("inf")]), EncodingOptions("bf16"))
    assert torch.isnan(back).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("shift", [0.0, 1e8])
def test_int8_is_within_half_a_step_of_the_largest_over_127(
    count: int, dtype: torch.dtype, shift: float
) -> None:
    values = torch.randn(count, dtype=dtype) * 5 + shift
    encoding, stored, back = there_and_back(values, EncodingOptions("int8"))
    largest = values.double().abs().max().item()
    assert encoding.kind is Kind.INT8
    assert len(stored) == count
    error = (back.double() - values.double()).abs().max().item()
    assert error <= largest / 127 / 2 * (1 + 1e-5) + largest * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "values",
    [[float("nan"), 1.0], [float("inf"), 1.0], [-float("inf"), 1.0], [0.0, -0.0], [1e-44, 0.0]],
    ids=["nan", "inf", "-inf", "zeros", "subnormal"],
)
def test_int8_leaves_exact_what_no_scale_fits(values: list[float]) -> None:
    encoding, _, back = there_and_back(torch.tensor(values), EncodingOptions("int8"))
    assert encoding.kind is Kind.RAW
    assert bytes_of(back) == bytes_of(torch.tensor(values))


@pytest.mark.parametrize("store_dtype", ["bf16", "int8"])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8], ids=str
)
def test_other_dtypes_are_exact(dtype: torch.dtype, store_dtype: StoreDtype) -> None:
    values = torch.arange(1, 100).to(dtype)
    encoding, _, back = there_and_back(values, EncodingOptions(store_dtype))
    assert encoding.kind is Kind.RAW
    assert torch.equal(back, values)


@pytest.mark.parametrize("options", [EncodingOptions(), EncodingOptions("bf16"), EncodingOptions("int8")])
def test_bytes_that_are_no_whole_elements_are_exact(options: EncodingOptions) -> None:
    source = memoryview(bytearray(b"1234567"))
    assert options.choose(source, torch.float32).kind is Kind.RAW
    assert options.choose(source[:0], torch.bool).kind is Kind.RAW


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="bf16, int8 or None, not 'fp4'"):
        EncodingOptions("fp4")  # type: ignore[arg-type]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_int8_never_leaves_the_range_of_its_values(values: list[float]) -> None:
    exact = torch.tensor(values)
    encoding, stored, back = there_and_back(exact, EncodingOptions("int8"))
    if encoding.kind is Kind.INT8:
        assert np.abs(np.frombuffer(stored, np.int8).astype(int)).max() == 127
        assert torch.isfinite(back).all()


@pytest.mark.parametrize(
    ("encoding", "remark"),
    [
        (Encoding(Kind.RAW, torch.float32), ""),
        (Encoding(Kind.BITS, torch.bool, 8), "torch.bool as bits"),
        (Encoding(Kind.BF16, torch.float32, 2), "torch.float32 as bf16"),
        (Encoding(Kind.INT8, torch.float32, 4, 0.5), "torch.float32 as int8, to be multiplied with 0.5"),
    ],
)
def test_readers_of_a_file_are_told_how_it_is_encoded(encoding: Encoding, remark: str) -> None:
    assert encoding.remark == remark
