"""Wire dtypes and torch's."""

import torch

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import tensor_pb2 as pb
from trocar_server.errors import ServiceError

_DTYPES: dict[torch.dtype, pb.Dtype.ValueType] = {
    torch.float32: pb.DTYPE_FLOAT32,
    torch.float64: pb.DTYPE_FLOAT64,
    torch.float16: pb.DTYPE_FLOAT16,
    torch.bfloat16: pb.DTYPE_BFLOAT16,
    torch.uint8: pb.DTYPE_UINT8,
    torch.int8: pb.DTYPE_INT8,
    torch.int16: pb.DTYPE_INT16,
    torch.int32: pb.DTYPE_INT32,
    torch.int64: pb.DTYPE_INT64,
    torch.bool: pb.DTYPE_BOOL,
    torch.complex64: pb.DTYPE_COMPLEX64,
    torch.complex128: pb.DTYPE_COMPLEX128,
}
_TORCH = {wire: dtype for dtype, wire in _DTYPES.items()}


def to_wire(dtype: torch.dtype | None) -> pb.Dtype.ValueType:
    """Return the wire dtype; unspecified for none and for those that the wire does not have."""
    return _DTYPES.get(dtype, pb.DTYPE_UNSPECIFIED) if dtype is not None else pb.DTYPE_UNSPECIFIED


def from_wire(field: str, dtype: pb.Dtype.ValueType) -> torch.dtype:
    """Return torch's dtype.

    Raises:
        ServiceError: `INVALID_TENSOR` when it is unset or unknown.
    """
    if dtype not in _TORCH:
        raise ServiceError(
            ErrorReason.INVALID_TENSOR, f"{field}: dtype {dtype} is unset or unknown", field=field
        )
    return _TORCH[dtype]


def spec_to_wire(shape: tuple[int, ...], dtype: torch.dtype | None) -> pb.TensorSpec:
    """Describe a tensor."""
    return pb.TensorSpec(dtype=to_wire(dtype), shape=shape)
