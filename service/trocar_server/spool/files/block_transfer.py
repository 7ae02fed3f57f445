"""Transfer of a block to its place in a file, and back: pieces, encoding, checksum."""

import zlib
from dataclasses import dataclass

import torch

from trocar_server.spool.files.chunks import ChunkFile
from trocar_server.spool.files.direct_memory import PAGE_BYTES, BufferPool, aligned, as_storage, padded
from trocar_server.spool.files.encoding import Encoding, Kind
from trocar_server.spool.spool_errors import SpoolReadError

PIECE_BYTES = 1 << 20
"""Of encoded bytes: a buffer that stays in the processor's cache."""

_ALIGNMENT = 64


@dataclass(frozen=True)
class Place:
    """Where a block is on disk.

    Attributes:
        chunk: The file.
        offset: Its first byte in the file.
        byte_count: What it takes there.
        encoding: Its encoding.
        checksum: Of the bytes in the file; None where not requested.
    """

    chunk: ChunkFile
    offset: int
    byte_count: int
    encoding: Encoding
    checksum: int | None = None


def phase_of(address: int, encoding: Encoding) -> int:
    """Return a block's offset from the start of a page; see Note: [Page offset of a block]."""
    is_as_in_memory = encoding.kind is Kind.RAW and address % _ALIGNMENT == 0
    return address % PAGE_BYTES if is_as_in_memory else 0


class Transfer:
    """Writes and reads blocks; holds the pages that this takes, so that each thread needs its own.

    Args:
        has_checksum: Whether to note a checksum when writing.
    """

    def __init__(self, has_checksum: bool = False) -> None:
        self._has_checksum = has_checksum
        self._memory, start = aligned(PIECE_BYTES)
        self._staging = self._memory.data[start : start + PIECE_BYTES]

    def write(
        self, chunk: ChunkFile, offset: int, source: memoryview, address: int, encoding: Encoding
    ) -> Place:
        """Write a block that lies at an address; returns where it is now.

        Raises:
            OSError: The disk is full or failing.
        """
        size = encoding.stored_bytes(source.nbytes)
        if encoding.kind is Kind.RAW and address % PAGE_BYTES == offset % PAGE_BYTES:
            chunk.write(offset - offset % PAGE_BYTES, self._whole_pages(source, offset % PAGE_BYTES))
            checksum = zlib.crc32(source) if self._has_checksum else None
        else:
            checksum = self._write_encoded(chunk, offset, source, encoding)
        return Place(chunk, offset, size, encoding, checksum)

    def read(self, place: Place, byte_count: int, buffers: BufferPool) -> torch.UntypedStorage:
        """Read a block of `byte_count` bytes; returns a storage of that size.

        Raises:
            OSError: The disk is failing.
            SpoolReadError: The file is short or altered.
        """
        is_raw = place.encoding.kind is Kind.RAW
        phase = place.offset % PAGE_BYTES if is_raw else 0
        pages, array = buffers.take(phase, byte_count)
        block = array.data
        if is_raw:
            place.chunk.read(place.offset - phase, pages)
            checksum = zlib.crc32(block) if place.checksum is not None else None
        else:
            checksum = self._read_encoded(place, block)
        if checksum != place.checksum:
            raise SpoolReadError(
                f"{place.chunk.path.name} was modified: the checksum of its saved tensors does not match"
            )
        return as_storage(array)

    def _whole_pages(self, source: memoryview, phase: int) -> list[memoryview]:
        """Cut a block into pages; the first and the last go through ours where they are not whole."""
        head = min(-phase % PAGE_BYTES, source.nbytes)
        tail = (source.nbytes - head) % PAGE_BYTES
        pieces = [source[head : source.nbytes - tail]]
        if head:
            page = self._staging[:PAGE_BYTES]
            page[phase : phase + head] = source[:head]
            pieces.insert(0, page)
        if tail:
            page = self._staging[PAGE_BYTES : 2 * PAGE_BYTES]
            page[:tail] = source[source.nbytes - tail :]
            pieces.append(page)
        return [piece for piece in pieces if piece.nbytes]

    def _write_encoded(
        self, chunk: ChunkFile, offset: int, source: memoryview, encoding: Encoding
    ) -> int | None:
        checksum = 0
        step = PIECE_BYTES * encoding.ratio
        for index, start in enumerate(range(0, source.nbytes, step)):
            count = encoding.encode(source[start : start + step], self._staging)
            chunk.write(offset + index * PIECE_BYTES, [self._staging[: padded(count)]])
            checksum = zlib.crc32(self._staging[:count], checksum) if self._has_checksum else 0
        return checksum if self._has_checksum else None

    def _read_encoded(self, place: Place, block: memoryview) -> int | None:
        checksum = 0
        step = PIECE_BYTES * place.encoding.ratio
        for index, start in enumerate(range(0, block.nbytes, step)):
            target = block[start : start + step]
            count = place.encoding.stored_bytes(target.nbytes)
            place.chunk.read(place.offset + index * PIECE_BYTES, self._staging[: padded(count)])
            place.encoding.decode(self._staging[:count], target)
            checksum = zlib.crc32(self._staging[:count], checksum) if place.checksum is not None else 0
        return checksum if place.checksum is not None else None
