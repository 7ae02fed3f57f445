"""Header of a spool file: the saved tensors in it, and the gaps between them.

The safetensors format allows no holes between tensors, so each stretch without one is a tensor, too: `gap.N`
of bytes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from trocar_server.storage.tensor_header import CODES, describe, encode_header

DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, name): code for name, code in CODES.items()}
"""What the format and its reader for torch know; bytes of other kinds are named U8."""

_BYTES = "U8"


@dataclass(frozen=True)
class Item:
    """A tensor in a file.

    Attributes:
        name: Under which it is found in the file.
        dtype: What its elements are.
        start: Its first byte, counted from the end of the header.
        byte_count: Its size.
        remark: How it was encoded, for the file's metadata; empty for plain bytes.
        step: In which step it was saved.
        number: Counts the blocks of a spool.
        shape: Of the tensor; flat when None, or where it does not fit the bytes.
    """

    name: str
    dtype: torch.dtype
    start: int
    byte_count: int
    remark: str = ""
    step: int = 0
    number: int = 0
    shape: tuple[int, ...] | None = None

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.start + self.byte_count


def header(items: Iterable[Item], data_bytes: int, size: int) -> bytes:
    """Return the first `size` bytes of a file whose tensors lie in `data_bytes` bytes behind them.

    Args:
        items: In the order in which they lie.
        data_bytes: Up to the end of the file.
        size: Of the header with its length; what is left over is filled with spaces, as the format allows.
    """
    entries: dict[str, object] = {}
    remarks: dict[str, str] = {}
    end = 0
    for item in items:
        _add_gap(entries, end, item.start)
        entries[item.name] = _entry(item.dtype, item.start, item.end, item.shape)
        if item.remark:
            remarks[item.name] = item.remark
        end = item.end
    _add_gap(entries, end, data_bytes)
    return encode_header(entries, remarks, size)


def most_bytes(item: Item) -> int:
    """Return what an item and a gap may take in a header, at most."""
    shape_bytes = 0 if item.shape is None else 21 * len(item.shape)
    remark_bytes = len(item.name) + len(item.remark) + 8 if item.remark else 0
    return 2 * 110 + len(item.name) + shape_bytes + remark_bytes


def _add_gap(entries: dict[str, object], start: int, end: int) -> None:
    if end > start:
        entries[f"gap.{len(entries)}"] = _entry(torch.uint8, start, end)


def _entry(
    dtype: torch.dtype, start: int, end: int, shape: tuple[int, ...] | None = None
) -> dict[str, object]:
    name = DTYPE_NAMES.get(dtype, _BYTES)
    item_bytes = 1 if name == _BYTES else dtype.itemsize
    if (end - start) % item_bytes:
        name, item_bytes = _BYTES, 1
    count = (end - start) // item_bytes
    sizes = [count] if shape is None or math.prod(shape) != count else list(shape)
    return describe(name, sizes, start, end)
