"""Files of many tensors, each a valid safetensors file, written piece by piece.

# Note: [A safetensors file that grows]
The header of the format comes first and names every tensor, but the tensors come one by one. So room is kept for
it: 64 KiB, filled up with spaces, which the format allows. Data begins behind it and each block at a multiple of
4096, which direct I/O wants; the format allows no holes, so the gaps are tensors, too, called `gap.N`. The header is
written when the file is sealed.
"""

import contextlib
import errno
import json
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

from trocar_server.spool.errors import SpoolError, SpoolFullError, SpoolReadError

ALIGNMENT = 4096
HEADER_BYTES = 64 << 10
_BYTES_PER_NAME = 160
_MAX_BLOCKS = HEADER_BYTES // (2 * _BYTES_PER_NAME)
_PIECE_BYTES = 4 << 20


def padded(byte_count: int) -> int:
    """Round up to whole pages."""
    return -(-byte_count // ALIGNMENT) * ALIGNMENT


@dataclass
class ChunkFile:
    """One file and what is in it.

    Attributes:
        path: Where it is.
        descriptor: Open for reading and writing as long as the object lives.
        capacity: Bytes that blocks may take.
        used: Bytes taken, whole pages.
        live: Blocks that somebody still needs.
        is_sealed: Whether nothing more comes.
        is_direct: Whether the page cache is left out.
    """

    path: Path
    descriptor: int
    capacity: int
    is_direct: bool
    used: int = 0
    live: int = 0
    is_sealed: bool = False
    blocks: list[tuple[str, int, int]] = field(default_factory=list)

    @classmethod
    def create(cls, path: Path, capacity: int) -> "ChunkFile":
        """Make a new file for its owner only.

        Raises:
            SpoolError: It cannot be made.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with _named("cannot make a file for saved tensors"):
            try:
                return cls(path, os.open(path, flags | os.O_DIRECT, 0o600), capacity, True)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a filesystem without direct I/O, tmpfs for example
                    raise
            with contextlib.suppress(FileNotFoundError):
                path.unlink()  # some leave it behind when they refuse the flag
            return cls(path, os.open(path, flags, 0o600), capacity, False)

    def has_room(self, byte_count: int) -> bool:
        """Whether another block fits."""
        is_open = not self.is_sealed and len(self.blocks) < _MAX_BLOCKS
        return is_open and self.used + padded(byte_count) <= self.capacity

    def place(self, name: str, byte_count: int) -> int:
        """Take room for a block; returns where it begins in the file."""
        offset = self.used
        self.used += padded(byte_count)
        self.live += 1
        self.blocks.append((name, offset, byte_count))
        return HEADER_BYTES + offset

    def write(self, offset: int, source: memoryview, staging: mmap.mmap) -> None:
        """Write a block, in whole pages through an aligned buffer.

        Raises:
            SpoolFullError: The disk is full.
            SpoolError: Another error of the disk.
        """
        with _named("cannot write saved tensors"):
            for start in range(0, source.nbytes, _PIECE_BYTES):
                piece = source[start : start + _PIECE_BYTES]
                size = padded(piece.nbytes)
                staging[: piece.nbytes] = piece
                self._write_all(memoryview(staging)[:size], offset + start)

    def read(self, offset: int, target: memoryview) -> None:
        """Fill an aligned buffer of whole pages.

        Raises:
            SpoolReadError: The file is shorter than it was, or cannot be read.
        """
        done = 0
        try:
            while done < target.nbytes:
                count = os.preadv(self.descriptor, [target[done:]], offset + done)
                if not count:
                    raise SpoolReadError(f"{self.path.name} is shorter than it was: saved tensors are lost")
                done += count
        except OSError as error:
            raise SpoolReadError(f"cannot read saved tensors: {error.strerror}") from error

    def seal(self) -> None:
        """Write the header: from now on it is a safetensors file."""
        if self.is_sealed:
            return
        self.is_sealed = True
        header = json.dumps(self._header(), separators=(",", ":")).encode()
        size = HEADER_BYTES - 8
        page = mmap.mmap(-1, HEADER_BYTES)
        page[:] = size.to_bytes(8, "little") + header.ljust(size)
        with _named("cannot write saved tensors"):
            self._write_all(memoryview(page), 0)

    def reset(self) -> None:
        """Forget what is in it, to be written anew."""
        self.used, self.live, self.is_sealed = 0, 0, False
        self.blocks.clear()

    def remove(self) -> None:
        """Close and delete it."""
        with contextlib.suppress(OSError):
            os.close(self.descriptor)
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _header(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, start, byte_count in self.blocks:
            end = start + byte_count
            found[name] = _entry(start, end)
            if end % ALIGNMENT:
                found[f"gap.{len(found)}"] = _entry(end, padded(end))
        return found

    def _write_all(self, source: memoryview, offset: int) -> None:
        done = 0
        while done < source.nbytes:
            done += os.pwritev(self.descriptor, [source[done:]], offset + done)


def _entry(start: int, end: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


@contextlib.contextmanager
def _named(what: str):  # type: ignore[no-untyped-def]
    try:
        yield
    except OSError as error:
        kind = SpoolFullError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else SpoolError
        raise kind(f"{what}: {error.strerror}") from error
