"""Encoding of a block on disk: raw, or packed into fewer bytes.

Lossless: booleans as bits. Lossy, and only on demand: float32 and float64 as bfloat16, or as int8 with one
scale per block. Blocks in memory are never changed; a block read back from disk has its original dtype.

Every encoding makes `ratio` bytes into one, so that a block is encoded and decoded piece by piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal, cast

import numpy as np
import torch

StoreDtype = Literal["bf16", "int8"]
"""A lossy way to write floating point."""

STORE_DTYPES: tuple[StoreDtype, ...] = ("bf16", "int8")

_INT8_MAX = 127
# Below this many elements torch works in the calling thread alone, without a team of threads for the writer
# (at::internal::GRAIN_SIZE, 32768).
_SERIAL_COUNT = 32_000


class Kind(Enum):
    """Kinds of encoding."""

    RAW = "raw"
    BITS = "bits"
    BF16 = "bf16"
    INT8 = "int8"


@dataclass(frozen=True)
class Encoding:
    """One way to store a block.

    Attributes:
        kind: Which.
        dtype: Of the block.
        ratio: Bytes of the block for one byte in the file.
        scale: What an int8 is multiplied with.
    """

    kind: Kind
    dtype: torch.dtype
    ratio: int = 1
    scale: float = 1.0

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the elements in the file."""
        stored = {Kind.BITS: torch.uint8, Kind.BF16: torch.bfloat16, Kind.INT8: torch.int8}
        return stored.get(self.kind, self.dtype)

    @property
    def is_lossy(self) -> bool:
        """Whether the decoded bytes differ from the original."""
        return self.kind in (Kind.BF16, Kind.INT8)

    @property
    def remark(self) -> str:
        """Note for readers of the file; empty for plain bytes."""
        if self.kind is Kind.INT8:
            return f"{self.dtype} as int8, to be multiplied with {self.scale!r}"
        return "" if self.kind is Kind.RAW else f"{self.dtype} as {self.kind.value}"

    def stored_bytes(self, byte_count: int) -> int:
        """Return how many bytes a block of `byte_count` takes in the file."""
        return -(-byte_count // self.ratio)

    def encode(self, source: memoryview, target: memoryview) -> int:
        """Fill `target` with a piece of a block; returns how many bytes it takes there."""
        count = self.stored_bytes(source.nbytes)
        if self.kind is Kind.RAW:
            target[:count] = source
        elif self.kind is Kind.BITS:
            target[:count] = np.packbits(np.frombuffer(source, np.uint8)).data
        else:
            for exact, stored in self._pairs(source, target[:count]):
                if self.kind is Kind.INT8:
                    stored.copy_((exact / self.scale).round_())
                else:
                    stored.copy_(exact)
        return count

    def decode(self, source: memoryview, target: memoryview) -> None:
        """Fill `target` with a piece of a block from a piece of a file."""
        if self.kind is Kind.RAW:
            target[:] = source
        elif self.kind is Kind.BITS:
            bits = np.unpackbits(np.frombuffer(source, np.uint8), count=target.nbytes)
            target[:] = bits.data
        else:
            for exact, stored in self._pairs(target, source):
                exact.copy_(stored)
                if self.kind is Kind.INT8:
                    exact.mul_(self.scale)

    def _pairs(self, exact: memoryview, stored: memoryview) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield short pieces of a block as tensors, and the same elements as they are in the file."""
        wide = torch.frombuffer(exact, dtype=self.dtype)
        narrow = torch.frombuffer(stored, dtype=self.stored_dtype)
        yield from zip(wide.split(_SERIAL_COUNT), narrow.split(_SERIAL_COUNT), strict=True)


@dataclass(frozen=True)
class EncodingOptions:
    """Allowed encodings of the bytes on disk.

    Attributes:
        store_dtype: A lossy dtype for floating point, or None to keep it exact.
        bits: Whether booleans are stored as bits.
    """

    store_dtype: StoreDtype | None = None
    bits: bool = True

    def __post_init__(self) -> None:
        if self.store_dtype is not None and self.store_dtype not in STORE_DTYPES:
            raise ValueError(
                f"store_dtype is one of {', '.join(STORE_DTYPES)} or None, not {self.store_dtype!r}"
            )

    def choose(self, source: memoryview, dtype: torch.dtype) -> Encoding:
        """Return the encoding for the bytes of a block."""
        raw = Encoding(Kind.RAW, dtype)
        if source.nbytes == 0 or source.nbytes % dtype.itemsize:
            return raw
        if dtype is torch.bool and self.bits:
            return Encoding(Kind.BITS, dtype, 8) if _is_zero_or_one(source) else raw
        if dtype not in (torch.float32, torch.float64) or self.store_dtype is None:
            return raw
        if self.store_dtype == "bf16":
            return Encoding(Kind.BF16, dtype, dtype.itemsize // 2)
        scale = _scale(source, dtype)
        return raw if scale is None else Encoding(Kind.INT8, dtype, dtype.itemsize, scale)


def _is_zero_or_one(source: memoryview) -> bool:
    """Whether bits are lossless: a byte viewed as a boolean may have any value."""
    return int(np.frombuffer(source, np.uint8).max()) <= 1


def _scale(source: memoryview, dtype: torch.dtype) -> float | None:
    """Return the step of an int8; None where none will do: NaN, infinity, zeros, or almost so."""
    values = np.frombuffer(source, np.float32 if dtype is torch.float32 else np.float64)
    largest = max(float(values.max()), -float(values.min()))
    scale = largest / _INT8_MAX
    is_usable = scale >= torch.finfo(dtype).tiny and largest <= torch.finfo(dtype).max / 2  # not for NaN
    return scale if is_usable else None


def store_dtype(name: str | None) -> StoreDtype | None:
    """Check the name of a lossy dtype.

    Raises:
        ValueError: There is none of that name.
    """
    EncodingOptions(cast("StoreDtype | None", name))
    return cast("StoreDtype | None", name)
