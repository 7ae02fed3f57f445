"""Tensor conversion: arrays to wire tensors and back, without a copy if the memory layout is the wire's."""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trocar_api.enums import numbers
from trocar_api.v1 import tensor_pb2 as pb

Array: TypeAlias = NDArray[Any]
Bytes: TypeAlias = NDArray[np.uint8]
"""A flat array of bytes."""

MAX_RANK = 8

WIRE_DTYPES = numbers(pb.Dtype)
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


def usual_channel_dim(rank: int) -> int:
    """Return the dimension of the channels where no reply says it: the last of rank 3, otherwise 1."""
    return 2 if rank == 3 else 1


def _with_bytes(dtype: pb.Dtype.ValueType, shape: tuple[int, ...], payload: bytes) -> WireTensor:
    return WireTensor(dtype, shape, memoryview(payload))


@cache
def wire_numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype that holds the wire's bytes; bfloat16 has none, so uint16 holds its bits."""
    return np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<")


@cache
def result_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype that a feature map of this wire dtype has; float32 for bfloat16, exactly."""
    return np.dtype("float32" if name == "bfloat16" else name)


def to_wire(value: object) -> WireTensor:
    """Convert an array or tensor of any library to the wire's layout.

    Args:
        value: NumPy array, torch tensor (any device, bfloat16 too), or anything with `__array__`
            or `__dlpack__`.

    Raises:
        TypeError: It is not an array, or its dtype has no wire dtype.
        ValueError: It has more than 8 dimensions.
    """
    return named_to_wire(*_host_array(value))


def named_to_wire(array: Array, name: str) -> WireTensor:
    """Convert the result of `named_array` to the wire; raises what `to_wire` raises."""
    check_sendable(array, name)
    if array.ndim > MAX_RANK:
        raise ValueError(f"an array of {array.ndim} dimensions cannot be sent; the maximum is {MAX_RANK}")
    little_endian = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    return WireTensor(WIRE_DTYPES[name], array.shape, flat_bytes(little_endian).data)


def check_sendable(array: Array, name: str) -> None:
    """Reject a dtype that has no wire dtype.

    Raises:
        TypeError: It has none; the message has the line of code that converts it.
    """
    if name not in WIRE_DTYPES:
        raise TypeError(f"dtype {name} cannot be sent: {_remedy(array.dtype)}")


_WIDER = {
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "int64",
    "float128": "float64",
    "longdouble": "float64",
}
"""NumPy dtypes for values of dtypes that the wire does not have; float32 for all others."""


def _remedy(dtype: np.dtype[Any]) -> str:
    """Return the line of code that converts an array of this dtype to a sendable one."""
    if dtype.kind == "O":
        return (
            'its elements are Python objects; `np.array(values, dtype="float32")` makes numbers of them, '
            "and a list takes arrays of different sizes"
        )
    if dtype.kind in "UST":
        return (
            "it is text; pass paths of images as a list, `array.tolist()`, and words as a tokeniser's numbers"
        )
    if dtype.kind in "mM":
        return 'it contains times; send numbers, `array.astype("int64")`'
    if dtype.names:
        return "it has fields; `numpy.lib.recfunctions.structured_to_unstructured(array)` has none"
    known = ", ".join(WIRE_DTYPES)
    return f'convert it, `array.astype("{_WIDER.get(dtype.name, "float32")}")`; available: {known}'


def flat_bytes(array: Array) -> Bytes:
    """View the memory of a C-contiguous array as a flat array of bytes."""
    return array.reshape(-1).view(np.uint8)


def is_array(value: object) -> bool:
    """Whether a value is an array or tensor of some library."""
    return isinstance(value, np.ndarray) or hasattr(value, "__dlpack__") or hasattr(value, "__array__")


def as_numpy(value: object) -> Array:
    """Return the host array of any library's array; the bits as uint16 where it is bfloat16."""
    return _host_array(value)[0]


def float_array(value: object) -> Array:
    """Return the host array of any library's array; bfloat16, which NumPy does not have, exactly as float32.

    Raises:
        TypeError: It is not an array.
    """
    array, name = _host_array(value)
    if name != "bfloat16":
        return array
    wide = np.empty(array.shape, np.float32)
    widen_bfloat16(array, wide)
    return wide


def named_array(value: object) -> tuple[Array, str]:
    """Return the host array of any library's array and the name of its dtype; bfloat16 as its bits in uint16.

    Raises:
        TypeError: It is not an array.
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
    """Return the float32 values of quantized int8 values: `scale * sent`, rounded once.

    Args:
        array: As received.
        scales: Of the reply: one, or one per channel.
        channel_dim: The dimension of the scales, from 0; None for one scale.

    Raises:
        ValueError: The number of scales does not fit.
    """
    count = 1 if channel_dim is None else array.shape[channel_dim]
    if len(scales) != count:
        raise ValueError(f"{len(scales)} scales received for {count}")
    shape = [count if dim == channel_dim else 1 for dim in range(array.ndim)]
    # Scales are float32 numbers, so the product is rounded once, as if it were made in float64.
    return np.multiply(array, np.asarray(scales, np.float32).reshape(shape), dtype=np.float32)


def _host_array(value: Any) -> tuple[Array, str]:
    """Return the array and the name of its dtype; bfloat16 is returned as its bits in uint16."""
    if isinstance(value, np.ndarray):
        if hasattr(value, "mask") and hasattr(
            value, "filled"
        ):  # a np.ma.MaskedArray, whose module takes time to import
            raise TypeError(
                "a masked array cannot be sent; replace masked elements first, for example with "
                "`array.filled(0)`"
            )
        array = value
    elif hasattr(value, "detach"):
        return _host_array_of_torch(value)
    elif hasattr(value, "__array__"):
        array = np.asarray(value)
    elif hasattr(value, "__dlpack__"):
        array = _from_dlpack(value)
    else:
        raise TypeError(f"{type(value).__name__} is not an array or tensor")
    if array.dtype.name == "bfloat16":  # ml_dtypes, as JAX uses it
        return array.view(np.uint16), "bfloat16"
    return array, array.dtype.name


def _from_dlpack(value: Any) -> Array:
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError) as error:
        raise TypeError(
            f"NumPy cannot read {type(value).__name__} through DLPack ({error}); bring it to the host first, "
            "as float32 where it is bfloat16"
        ) from error


def _not_readable(tensor: Any) -> str:
    """Return why a tensor has no host array, and what makes one."""
    if getattr(tensor, "is_meta", False):
        return "a tensor on the meta device has no values to send; make it on the CPU"
    if str(getattr(tensor, "layout", "torch.strided")) != "torch.strided":
        return f"a tensor of layout {tensor.layout} cannot be sent; `tensor.to_dense()` can"
    return f"this {type(tensor).__name__} of dtype {tensor.dtype} cannot be read; send `tensor.cpu().numpy()`"


def _host_array_of_torch(tensor: Any) -> tuple[Array, str]:
    """Read a torch tensor without importing torch: the tensor's creator has imported it."""
    if str(tensor.dtype) != "torch.bfloat16":
        try:
            array: Array = tensor.numpy(force=True)
        except (TypeError, NotImplementedError, RuntimeError):
            raise TypeError(_not_readable(tensor)) from None
        return array, array.dtype.name
    bits = tensor.detach().cpu().contiguous().view(sys.modules["torch"].int16)
    return bits.numpy().view(np.uint16), "bfloat16"
