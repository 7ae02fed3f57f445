"""Mapping between dtypes and tensor specifications on the wire and in torch.

Sizes are Python integers, so nothing overflows.
"""

from collections.abc import Sequence

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import tensor_pb2 as pb
from trocar_server.engine.request.dtypes import DTYPES, Dtype
from trocar_server.errors import ServiceError
from trocar_server.tensors.reductions import OperandSpec

MAX_RANK = 8
_NAMES = (
    *("float32", "float64", "float16", "bfloat16"),
    *("uint8", "int8", "int16", "int32", "int64", "bool"),
    *("complex64", "complex128"),
)
_DTYPES = {DTYPES[name]: pb.Dtype.Value(f"DTYPE_{name.upper()}") for name in _NAMES}
_TORCH = {wire: dtype for dtype, wire in _DTYPES.items()}


def to_wire(dtype: Dtype | None) -> pb.Dtype.ValueType:
    """Return the wire dtype; unspecified for None and for dtypes that the wire lacks."""
    return _DTYPES.get(dtype, pb.DTYPE_UNSPECIFIED) if dtype is not None else pb.DTYPE_UNSPECIFIED


def from_wire(field: str, dtype: pb.Dtype.ValueType) -> Dtype:
    """Return torch's dtype.

    Raises:
        ServiceError: `INVALID_TENSOR` when it is unset or unknown.
    """
    if dtype not in _TORCH:
        raise ServiceError(
            ErrorReason.INVALID_TENSOR, f"{field}: dtype {dtype} is unset or unknown", field=field
        )
    return _TORCH[dtype]


def spec_to_wire(shape: tuple[int, ...], dtype: Dtype | None) -> pb.TensorSpec:
    """Describe a tensor."""
    return pb.TensorSpec(dtype=to_wire(dtype), shape=shape)


def tensor_byte_count(field: str, shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes of a tensor of this shape.

    Raises:
        ServiceError: `INVALID_TENSOR` for a rank over 8 or a negative size.
    """
    if len(shape) > MAX_RANK:
        raise ServiceError(
            ErrorReason.INVALID_TENSOR, f"{field}: rank {len(shape)} is over {MAX_RANK}", field=field
        )
    count = itemsize
    for size in shape:
        if size < 0:
            raise ServiceError(ErrorReason.INVALID_TENSOR, f"{field}: size {size} is negative", field=field)
        count *= size
    return count


def tensor_operand_from_wire(field: str, spec: pb.TensorSpec) -> OperandSpec:
    """Convert and check the shape and dtype of an operand; `field` is its name in errors.

    Raises:
        ServiceError: `INVALID_TENSOR`, with the field named.
    """
    dtype, shape = from_wire(field, spec.dtype), tuple(spec.shape)
    tensor_byte_count(field, shape, dtype.itemsize)
    return OperandSpec(dtype, shape)
