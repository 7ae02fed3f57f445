"""Files of many tensors, each a valid safetensors file, written piece by piece.

# Note: [A safetensors file that grows]
The header of the format comes first and names every tensor, but the tensors come one by one. So room is kept
for it, filled up with spaces. It is written when the file is sealed, and when the writer has nothing else to
do.

# Note: [A block lies as in memory]
Direct I/O wants addresses, sizes and offsets at multiples of a page. Memory of torch begins at multiples of
64. So a block is put at the same distance from a page in the file as in memory: its whole pages are written
from where they are, without a copy, and only its first and last piece go through a page of ours. Read into
whole pages, it has the same alignment as before.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trocar_server.spool.errors import SpoolReadError
from trocar_server.spool.header import Item, header, most_bytes
from trocar_server.spool.memory import aligned, padded

HEADER_BYTES = 128 << 10


class Descriptor:
    """A file descriptor that is open as long as somebody has it: no thread reads a stranger's file."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


@dataclass(eq=False)
class ChunkFile:
    """One file and what is in it.

    Attributes:
        path: Where it is.
        is_direct: Whether the page cache is left out.
        capacity: Bytes that blocks may take at present.
        size: Bytes behind the header that the file has.
        used: Bytes taken, whole pages.
        live: Blocks that somebody still needs.
        is_condemned: Whether it must go when nobody needs it, after a fault.
    """

    path: Path
    capacity: int
    is_direct: bool
    _descriptor: Descriptor | None
    size: int = 0
    used: int = 0
    live: int = 0
    is_condemned: bool = False
    _items: list[Item] = field(default_factory=list)
    _header_bytes: int = 64
    _is_named: bool = False

    @classmethod
    def create(cls, path: Path, capacity: int) -> "ChunkFile":
        """Make a new file for its owner only.

        Raises:
            OSError: It cannot be made.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return cls(
                path, capacity, True, Descriptor(os.open(path, flags | os.O_EXCL | os.O_DIRECT, 0o600))
            )
        except OSError as error:
            if error.errno != errno.EINVAL:  # a filesystem without direct I/O
                raise
        # Not exclusive: some filesystems make the file before they refuse the flag. The folder is ours alone.
        return cls(path, capacity, False, Descriptor(os.open(path, flags, 0o600)))

    def has_room(self, page_bytes: int, item: Item) -> bool:
        """Whether another block fits, in so many bytes of whole pages."""
        has_bytes = self.used + page_bytes <= self.capacity
        return has_bytes and self._header_bytes + most_bytes(item) <= HEADER_BYTES

    def place(self, item: Item, phase: int) -> int:
        """Take room for a block, `phase` bytes behind the begin of a page; returns its offset in the file."""
        start = self.used + phase
        self.used += padded(phase + item.byte_count)
        self.size = max(self.size, self.used)
        self.live += 1
        placed = Item(item.name, item.dtype, start, item.byte_count, item.remark)
        self._items.append(placed)
        self._header_bytes += most_bytes(placed)
        self._is_named = False
        return HEADER_BYTES + start

    def write(self, offset: int, pieces: list[memoryview]) -> None:
        """Write whole pages, from page-aligned memory, at a page of the file.

        Raises:
            OSError: The disk is full or failing.
        """
        descriptor = self._open_descriptor()
        pieces = list(pieces)
        while pieces:
            done = self._directly(lambda: os.pwritev(descriptor.number, pieces, offset))  # noqa: B023
            offset += done
            pieces = _behind(pieces, done)

    def read(self, offset: int, target: memoryview) -> None:
        """Fill a page-aligned buffer of whole pages from a page of the file.

        Raises:
            OSError: The disk is failing.
            SpoolReadError: The file is shorter than it was, or gone.
        """
        descriptor = self._open_descriptor()
        while target.nbytes:
            done = self._directly(lambda: os.preadv(descriptor.number, [target], offset))  # noqa: B023
            if not done:
                raise SpoolReadError(f"{self.path.name} is shorter than it was: saved tensors are lost")
            target, offset = target[done:], offset + done

    def name_tensors(self) -> None:
        """Write the header: now it is a safetensors file, until more comes.

        Raises:
            OSError: The disk is full or failing.
        """
        if self._is_named:
            return
        page, start = aligned(HEADER_BYTES)
        view = page.data[start : start + HEADER_BYTES]
        view[:] = header(self._items, self.size, HEADER_BYTES)
        self.write(0, [view])
        self._is_named = True

    def reset(self, capacity: int) -> None:
        """Forget what is in it, to be written anew; its room on disk stays."""
        self.used, self.live, self.capacity = 0, 0, capacity
        self._items.clear()
        self._header_bytes, self._is_named = 64, False

    def is_whole(self) -> bool:
        """Whether the file is still there and as long as it was."""
        descriptor = self._descriptor
        if descriptor is None:
            return False
        found = os.fstat(descriptor.number)
        return found.st_nlink > 0 and found.st_size >= HEADER_BYTES + self.size

    def forget(self) -> None:
        """Let go of the file without removing it."""
        self._descriptor = None

    def remove(self) -> None:
        """Delete the file; reads that are under way end as they would."""
        self.forget()
        try:
            self.path.unlink()
        except OSError:  # gone already, or the disk is: nothing to be done here
            return

    def _open_descriptor(self) -> Descriptor:
        if self._descriptor is None:
            raise SpoolReadError(
                "the spool was closed, or belongs to another process: saved tensors are lost"
            )
        return self._descriptor

    def _directly(self, transfer: Callable[[], int]) -> int:
        """Do direct I/O; do it through the page cache where the filesystem does not take it after all."""
        try:
            return transfer()
        except OSError as error:
            if error.errno != errno.EINVAL or not self.is_direct:
                raise
        number = self._open_descriptor().number
        fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.is_direct = False
        return transfer()


def _behind(pieces: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of pieces when the first `done` bytes are away."""
    while pieces and done >= pieces[0].nbytes:
        done -= pieces.pop(0).nbytes
    return [pieces[0][done:], *pieces[1:]] if pieces else []
