"""The header of a safetensors file: which bytes are which tensor.

The format (https://github.com/huggingface/safetensors#format) is eight bytes with the header's length, the
header as JSON, and the data. It allows no holes between tensors, so each stretch without one is a tensor,
too: `gap.N` of bytes.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

import torch

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""What the format and its reader for torch (safetensors 0.8) know; bytes of other kinds are named U8."""

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
    """

    name: str
    dtype: torch.dtype
    start: int
    byte_count: int
    remark: str = ""

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
        entries[item.name] = _entry(item.dtype, item.start, item.end)
        if item.remark:
            remarks[item.name] = item.remark
        end = item.end
    _add_gap(entries, end, data_bytes)
    if remarks:
        entries["__metadata__"] = remarks
    return (size - 8).to_bytes(8, "little") + json.dumps(entries, separators=(",", ":")).encode().ljust(
        size - 8
    )


def most_bytes(item: Item) -> int:
    """Return what an item and a gap may take in a header, at most."""
    return 2 * 110 + len(item.name) + (len(item.name) + len(item.remark) + 8 if item.remark else 0)


def _add_gap(entries: dict[str, object], start: int, end: int) -> None:
    if end > start:
        entries[f"gap.{len(entries)}"] = _entry(torch.uint8, start, end)


def _entry(dtype: torch.dtype, start: int, end: int) -> dict[str, object]:
    name = DTYPE_NAMES.get(dtype, _BYTES)
    item_bytes = 1 if name == _BYTES else dtype.itemsize
    if (end - start) % item_bytes:
        name, item_bytes = _BYTES, 1
    return {"dtype": name, "shape": [(end - start) // item_bytes], "data_offsets": [start, end]}
