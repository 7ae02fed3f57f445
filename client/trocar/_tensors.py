"""Arrays to wire tensors and back, without a copy where memory already has the wire's layout."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trocar_api.v1 import tensor_pb2 as pb

Array: TypeAlias = NDArray[Any]
Bytes: TypeAlias = NDArray[np.uint8]
"""A flat array of bytes."""

MAX_RANK = 8

WIRE_DTYPES: dict[str, pb.Dtype.ValueType] = {
    "float32": pb.DTYPE_FLOAT32,
    "float64": pb.DTYPE_FLOAT64,
    "float16": pb.DTYPE_FLOAT16,
    "bfloat16": pb.DTYPE_BFLOAT16,
    "uint8": pb.DTYPE_UINT8,
    "int8": pb.DTYPE_INT8,
    "int16": pb.DTYPE_INT16,
    "int32": pb.DTYPE_INT32,
    "int64": pb.DTYPE_INT64,
    "bool": pb.DTYPE_BOOL,
    "complex64": pb.DTYPE_COMPLEX64,
    "complex128": pb.DTYPE_COMPLEX128,
}
"""Wire dtype by name."""

DTYPE_NAMES: dict[int, str] = {number: name for name, number in WIRE_DTYPES.items()}
"""Name by wire dtype."""


class WireTensor(NamedTuple):
    """A tensor ready to send; `payload` is a flat view of bytes, of the caller's memory if it can be."""

    dtype: pb.Dtype.ValueType
    shape: tuple[int, ...]
    payload: memoryview

    def __reduce__(self) -> "tuple[Callable[..., WireTensor], tuple[Any, ...]]":
        """Pickle and copy it with its bytes: views cannot be pickled."""
        return _with_bytes, (self.dtype, self.shape, bytes(self.payload))


def _with_bytes(dtype: pb.Dtype.ValueType, shape: tuple[int, ...], payload: bytes) -> WireTensor:
    return WireTensor(dtype, shape, memoryview(payload))


def wire_numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype that holds the wire's bytes; bfloat16 has none, so uint16 holds its bits."""
    return np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<")


def result_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype that a feature map of this wire dtype has; float32 for bfloat16, exactly."""
    return np.dtype("float32" if name == "bfloat16" else name)


def to_wire(value: object) -> WireTensor:
    """Convert an array or tensor of any library to wire form.

    Args:
        value: NumPy array, torch tensor (any device, bfloat16 too), or anything with `__array__`
            or `__dlpack__`.

    Raises:
        TypeError: It is no array, or its dtype has no wire form.
        ValueError: It has more than 8 dimensions.
    """
    array, name = _host_array(value)
    if name not in WIRE_DTYPES:
        raise TypeError(f"dtype {name} cannot be sent; convert to one of {', '.join(WIRE_DTYPES)}")
    if array.ndim > MAX_RANK:
        raise ValueError(f"an array of {array.ndim} dimensions cannot be sent; the most is {MAX_RANK}")
    little_endian = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    return WireTensor(WIRE_DTYPES[name], array.shape, flat_bytes(little_endian).data)


def flat_bytes(array: Array) -> Bytes:
    """View the memory of a C-contiguous array as a flat array of bytes."""
    return array.reshape(-1).view(np.uint8)


def is_array(value: object) -> bool:
    """Tell whether a value is an array or tensor of some library."""
    return isinstance(value, np.ndarray) or hasattr(value, "__dlpack__") or hasattr(value, "__array__")


def as_numpy(value: object) -> Array:
    """Return the host array of any library's array; the bits as uint16 where it is bfloat16."""
    return _host_array(value)[0]


def named_array(value: object) -> tuple[Array, str]:
    """Return the host array of any library's array and the name of its dtype; bfloat16 as its bits in uint16.

    Raises:
        TypeError: It is no array.
    """
    return _host_array(value)


def widen_bfloat16(bits: NDArray[np.uint16], out: Array) -> None:
    """Write bfloat16 bits into a contiguous float32 array, exactly.

    A bfloat16 is the upper half of a float32.
    """
    np.left_shift(bits, 16, out=out.view(np.uint32), dtype=np.uint32)


def dequantize(
    array: NDArray[np.int8], scales: Sequence[float], channel_dim: int | None = None
) -> NDArray[np.float32]:
    """Return the float32 values that int8 values stand for: `scale * sent`, rounded once.

    Args:
        array: As it came.
        scales: Of the reply: one, or one per channel.
        channel_dim: The dimension of the scales, from 0; None for one scale.

    Raises:
        ValueError: The number of scales does not fit.
    """
    count = 1 if channel_dim is None else array.shape[channel_dim]
    if len(scales) != count:
        raise ValueError(f"{len(scales)} scales came for {count}")
    shape = [count if dim == channel_dim else 1 for dim in range(array.ndim)]
    # Scales are float32 numbers, so the product is rounded once, as if it were made in float64.
    return np.multiply(array, np.asarray(scales, np.float32).reshape(shape), dtype=np.float32)


def _host_array(value: Any) -> tuple[Array, str]:
    """Return the array and the name of its dtype; bfloat16 comes as its bits in uint16."""
    if isinstance(value, np.ndarray):
        array = value
    elif hasattr(value, "detach"):
        return _host_array_of_torch(value)
    elif hasattr(value, "__array__"):
        array = np.asarray(value)
    elif hasattr(value, "__dlpack__"):
        array = np.from_dlpack(value)
    else:
        raise TypeError(f"{type(value).__name__} is no array or tensor")
    if array.dtype.name == "bfloat16":  # ml_dtypes, as JAX uses it
        return array.view(np.uint16), "bfloat16"
    return array, array.dtype.name


def _host_array_of_torch(tensor: Any) -> tuple[Array, str]:
    """Read a torch tensor without importing torch: whoever made the tensor has imported it."""
    if str(tensor.dtype) != "torch.bfloat16":
        array: Array = tensor.numpy(force=True)
        return array, array.dtype.name
    bits = tensor.detach().cpu().contiguous().view(sys.modules["torch"].int16)
    return bits.numpy().view(np.uint16), "bfloat16"
