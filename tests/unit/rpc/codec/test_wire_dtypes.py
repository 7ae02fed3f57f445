"""Wire dtypes and torch's are the same set; sizes are counted in Python integers."""

import pytest
import torch

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import tensor_pb2 as pb
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.wire_dtypes import from_wire, spec_to_wire, tensor_byte_count, to_wire

WIRE = sorted(set(pb.Dtype.values()) - {pb.DTYPE_UNSPECIFIED})


@pytest.mark.parametrize("wire", WIRE, ids=pb.Dtype.Name)
def test_every_wire_dtype_is_one_of_torchs_and_back(wire: pb.Dtype.ValueType) -> None:
    assert to_wire(from_wire("x", wire)) == wire


@pytest.mark.parametrize("wire", WIRE, ids=pb.Dtype.Name)
def test_names_are_the_same(wire: pb.Dtype.ValueType) -> None:
    assert f"torch.{pb.Dtype.Name(wire).removeprefix('DTYPE_').lower()}" == str(from_wire("x", wire))


@pytest.mark.parametrize("wire", [0, -1, 13, 2**31 - 1])
def test_what_is_no_dtype_is_refused_with_its_field(wire: pb.Dtype.ValueType) -> None:
    with pytest.raises(ServiceError, match=r"^inputs\[0\]") as caught:
        from_wire("inputs[0]", wire)
    assert caught.value.reason is ErrorReason.INVALID_TENSOR


@pytest.mark.parametrize("dtype", [None, torch.uint16, torch.float8_e4m3fn])
def test_what_the_wire_has_no_dtype_for_is_unspecified(dtype: torch.dtype | None) -> None:
    assert to_wire(dtype) == pb.DTYPE_UNSPECIFIED


def test_a_tensor_is_described_by_dtype_and_shape() -> None:
    assert spec_to_wire((2, 0, 3), torch.bool) == pb.TensorSpec(dtype=pb.DTYPE_BOOL, shape=[2, 0, 3])


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [
        ((), 4, 4),
        ((2, 3), 4, 24),
        ((2, 0, 3), 8, 0),
        ((2**62, 2**62, 0), 4, 0),
        ((2**62, 4), 8, 2**67),
        ((2**63 - 1,) * 8, 16, 16 * (2**63 - 1) ** 8),
    ],
)
def test_bytes_are_counted_without_overflow(shape: tuple[int, ...], itemsize: int, expected: int) -> None:
    assert tensor_byte_count("inputs[0]", shape, itemsize) == expected


@pytest.mark.parametrize("shape", [(-1,), (2, -(2**63)), (-1, -1), (1,) * 9, (0,) * 200])
def test_impossible_shapes_are_refused_with_the_field(shape: tuple[int, ...]) -> None:
    with pytest.raises(ServiceError) as caught:
        tensor_byte_count("inputs[3].tensor", shape, 4)
    assert caught.value.reason is ErrorReason.INVALID_TENSOR
    assert caught.value.details["field"] == "inputs[3].tensor"
