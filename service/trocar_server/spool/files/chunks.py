"""Files of many tensors, each a valid safetensors file, written piece by piece.

# Note: [A safetensors file that grows]
The header of the format comes first and names every tensor, but the tensors come one by one. So room is kept
for it, filled up with spaces, and the file has a temporary name, `file-000003.part`. When it is full, and
when the writer has nothing else to do, the header is written and the file is published: it is renamed to
`step-000012-blocks-000034-000120-file-000003.safetensors`. What has that ending is complete and never
changes.

# Note: [Published files never change]
Files are reused, which is twice as fast as to create and delete them (20 against 40 ms for 64 MiB).
Before that the file gets its temporary name back, so that no reader opens it as complete. Whether a reader
still has it open or mapped, the kernel knows: it grants a lease for writing (`fcntl(2)`, F_SETLEASE)
only on a file that no other process has open. If one has, and on filesystems without leases, the file
stays as it is and is deleted after use. A process that opens the file while the lease is held, some
microseconds, waits for its end, and this one gets a signal: SIGURG, which does nothing by default.

# Note: [Page offset of a block]
Direct I/O wants addresses, sizes and offsets at multiples of a page. Memory of torch begins at multiples of
64. So a block is put at the same distance from a page in the file as in memory: its whole pages are written
from where they are, without a copy, and only its first and last piece go through a page of ours. Read into
whole pages, it has the same alignment as before.
"""

import contextlib
import errno
import fcntl
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from trocar_server.spool.files.direct_memory import aligned, padded
from trocar_server.spool.files.header import Item, header, most_bytes
from trocar_server.spool.spool_errors import SpoolReadError

HEADER_BYTES = 128 << 10

UNPUBLISHED = ".part"
"""The ending of files that are not complete, or not in use."""


class Descriptor:
    """A file descriptor that is open as long as it is referenced: no thread reads from a reused number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


@dataclass(eq=False)
class ChunkFile:
    """One file and what is in it.

    Attributes:
        path: Where it is; changes when it is published.
        is_direct: Whether the page cache is left out.
        capacity: Bytes that blocks may take at present.
        size: Bytes behind the header that the file has.
        used: Bytes taken, whole pages.
        live: Blocks with references.
        is_condemned: Whether it must be removed after its last block, because of a fault.
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
    _hidden: Path | None = None

    @classmethod
    def create(cls, path: Path, capacity: int) -> "ChunkFile":
        """Make a new file for its owner only, under a temporary name.

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
        # Not exclusive: some filesystems make the file before they reject the flag. The folder is ours alone.
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
        placed = replace(item, start=start)
        self._items.append(placed)
        self._header_bytes += most_bytes(placed)
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
                raise SpoolReadError(f"{self.path.name} was truncated: saved tensors are lost")
            target, offset = target[done:], offset + done

    def reserve_header(self) -> None:
        """Take the room for the header on disk.

        Raises:
            OSError: The disk is full or failing.
        """
        page, start = aligned(HEADER_BYTES)
        view = page.data[start : start + HEADER_BYTES]
        view[:] = header(self._items, self.size, HEADER_BYTES)
        self.write(0, [view])

    def publish(self) -> None:
        """Write the header and give the file its name, unless a fault has left it incomplete.

        Raises:
            OSError: The disk is full or failing.
        """
        if self._hidden is not None or not self._items or self.is_condemned or not self.is_whole():
            return
        self.reserve_header()
        first, last = self._items[0], self._items[-1]
        blocks = f"step-{first.step:06d}-blocks-{first.number:06d}-{last.number:06d}"
        published = self.path.with_name(f"{blocks}-{self.path.stem}.safetensors")
        self.path.rename(published)
        self._hidden, self.path = self.path, published

    def withdraw(self) -> bool:
        """Take the name back, so that more can be written; see Note: [Published files never change].

        Returns:
            Whether no other process has the file open. It is as before otherwise.
        """
        if self._hidden is None:
            return True
        published = self.path
        try:
            published.rename(self._hidden)
        except OSError:  # deleted from outside
            return False
        if not self._is_alone():
            with contextlib.suppress(OSError):
                self._hidden.rename(published)
            return False
        self.path, self._hidden = self._hidden, None
        return True

    def reset(self, capacity: int) -> None:
        """Clear its contents, to be rewritten; its space on disk stays allocated."""
        self.used, self.live, self.capacity = 0, 0, capacity
        self._items.clear()
        self._header_bytes = 64

    def is_whole(self) -> bool:
        """Whether the file is still there and as long as it was."""
        descriptor = self._descriptor
        if descriptor is None:
            return False
        result = os.fstat(descriptor.number)
        return result.st_nlink > 0 and result.st_size == HEADER_BYTES + self.size

    def forget(self) -> None:
        """Close the file without removing it."""
        self._descriptor = None

    def remove(self) -> None:
        """Delete the file; reads that are under way end as they would."""
        self.forget()
        try:
            self.path.unlink()
        except OSError:  # the file or the disk is gone already
            return

    def _is_alone(self) -> bool:
        """Whether no other process, nor this one otherwise, has the file open or mapped."""
        number = self._open_descriptor().number
        try:
            fcntl.fcntl(number, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(number, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(number, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

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
