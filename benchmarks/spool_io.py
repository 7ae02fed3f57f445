"""Spool I/O: writes and reads against plain direct I/O: `python -m benchmarks.spool_io [folder]`.

Plain is what a disk gives a careful program: pieces of 4 MiB, from and into one aligned buffer, over and
over. The spool writes tensors from where they are, with a header, into files used before, and reads each into
memory of its own, which is dropped before the next comes but one. Each figure is the median of rounds in
turn.
"""

import mmap
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.report import Row, Table, row
from trocar_server.spool.files.block_transfer import Place, Transfer, phase_of
from trocar_server.spool.files.direct_memory import BufferPool, storage_bytes
from trocar_server.spool.files.encoding import EncodingOptions
from trocar_server.spool.files.file_pool import ChunkPool
from trocar_server.spool.files.header import Item

_TOTAL_BYTES = 256 << 20
_PIECE_BYTES = 4 << 20
_BLOCK_KIB = (64, 512, 1568, 6272, 25088)
_ROUNDS = 7


class Plain:
    """One file, in pieces."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "plain", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._piece = mmap.mmap(-1, _PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._piece[:] = bytes(_PIECE_BYTES)

    def write(self) -> None:
        for offset in range(0, _TOTAL_BYTES, _PIECE_BYTES):
            os.pwrite(self._file, self._piece, offset)

    def read(self) -> None:
        for offset in range(0, _TOTAL_BYTES, _PIECE_BYTES):
            os.preadv(self._file, [self._piece], offset)


class Spooled:
    """Tensors of one size, through the spool."""

    def __init__(self, folder: Path, kib: int, options: EncodingOptions | None = None) -> None:
        self._options = options or EncodingOptions()
        self._pool = ChunkPool(folder)
        self._transfer = Transfer()
        self._buffers = BufferPool(64 << 20)
        self._tensors = [torch.randn(kib << 8) for _ in range(_TOTAL_BYTES // (kib << 10))]
        self._places: list[Place] = []

    def write(self) -> None:
        for place in self._places:
            self._pool.leave(place.chunk)
        self._places = [self._written(str(number), tensor) for number, tensor in enumerate(self._tensors)]

    def read(self) -> None:
        alive: deque[object] = deque(maxlen=2)
        for place, tensor in zip(reversed(self._places), reversed(self._tensors), strict=True):
            alive.append(self._transfer.read(place, tensor.nbytes, self._buffers))

    def close(self) -> None:
        self._pool.close()

    def _written(self, name: str, tensor: torch.Tensor) -> Place:
        source = storage_bytes(tensor.untyped_storage(), tensor.nbytes)
        encoding = self._options.choose(source, tensor.dtype)
        item = Item(name, encoding.stored_dtype, 0, encoding.stored_bytes(tensor.nbytes), encoding.remark)
        chunk, offset = self._pool.place(item, phase_of(tensor.data_ptr(), encoding))
        return self._transfer.write(chunk, offset, source, tensor.data_ptr(), encoding)


def seconds(call: Callable[[], None]) -> float:
    """Return the duration of a call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def compare(name: str, plain: Plain, spooled: Spooled) -> list[Row]:
    """Return a row for writing and one for reading."""
    calls = {"write": (plain.write, spooled.write), "read": (plain.read, spooled.read)}
    times: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in calls}
    spooled.write()
    for _ in range(_ROUNDS):
        for way, pair in calls.items():
            for call, result in zip(pair, times[way], strict=True):
                result.append(seconds(call))
    spooled.close()
    return [_row(f"{name}, {way}", *times[way]) for way in calls]


def _row(name: str, plain: list[float], spooled: list[float]) -> Row:
    speeds = [_TOTAL_BYTES / 1e9 / statistics.median(result) for result in (plain, spooled)]
    note = f"{speeds[1]:.2f} GB/s; plain {speeds[0]:.2f} GB/s"
    return row(name, speeds[1] / speeds[0], note=note, higher_is_better=True)


def main(arguments: Sequence[str] = ()) -> None:
    """Run every size and print the table."""
    parent = Path(arguments[0]) if arguments else None
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        plain = Plain(folder)
        plain.write()
        rows: list[Row] = []
        for kib in _BLOCK_KIB:
            rows += compare(f"tensors of {kib} KiB", plain, Spooled(folder, kib))
        for dtype in ("bf16", "int8"):
            options = EncodingOptions(store_dtype=dtype)
            rows += compare(f"6272 KiB as {dtype}", plain, Spooled(folder, 6272, options))
    table = Table("The spool's files: speed against plain direct I/O, by bytes of tensors", rows)
    print(f"\n### {table.title}\n\n{table.markdown()}")


if __name__ == "__main__":
    main(sys.argv[1:])
