"""Narrow dtypes: float32 as 16 bits on the wire, half of the bytes, for slow networks."""

from typing import get_args

import numpy as np
from numpy.typing import NDArray

from trocar._base.call_options import Wire
from trocar._base.tensors import Array
from trocar_api.value_words import not_one_of

_BLOCK = 1 << 18
_QUIET_NAN = 0x40


def check_wire(wire: str | None) -> None:
    """Check the wire dtype of float32 values.

    Raises:
        ValueError: There is no such dtype.
    """
    if wire is not None and wire not in get_args(Wire):
        raise ValueError(f"wire {not_one_of(wire, get_args(Wire))}")


def narrowed(array: Array, wire: Wire) -> Array:
    """Return a float32 array in 16 bits, rounded to nearest, ties to even; NaN and infinity stay.

    Args:
        array: Of float32, any shape.
        wire: "float16", or "bfloat16", which comes as its bits in uint16.

    Raises:
        ValueError: A finite value is too large for float16.
    """
    flat = np.ascontiguousarray(array, "<f4").reshape(-1)
    out: Array = np.empty(flat.size, np.float16 if wire == "float16" else np.uint16)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        target = out[start : start + _BLOCK]
        if wire == "float16":
            _to_float16(block, target)
        else:
            _to_bfloat16(block, target)
    return out.reshape(array.shape)


def _to_float16(block: NDArray[np.float32], out: NDArray[np.float16]) -> None:
    try:
        with np.errstate(over="raise", under="ignore"):
            out[:] = block
    except FloatingPointError:
        raise ValueError('the input exceeds the range of float16, 65,504; use wire="bfloat16"') from None


def _to_bfloat16(block: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
    bits = block.view(np.uint32)
    upper = bits >> 16
    # Half of the last bit that is kept, or just below it where that bit is 0: ties go to even.
    rounded = (bits + ((upper & 1) + 0x7FFF)) >> 16
    out[:] = np.where(np.isnan(block), upper | _QUIET_NAN, rounded)
