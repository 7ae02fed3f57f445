"""Blocks on disk: written to files of the pool, read into recycled buffers. No budget, no ordering."""

import re
from pathlib import Path

import torch

from trocar_server.spool.files.block_transfer import Place, Transfer, phase_of
from trocar_server.spool.files.direct_memory import BufferPool, storage_bytes
from trocar_server.spool.files.encoding import Encoding, Kind
from trocar_server.spool.files.entries import Block
from trocar_server.spool.files.file_pool import ChunkPool
from trocar_server.spool.files.header import Item
from trocar_server.spool.files.options import DiskOptions
from trocar_server.spool.report import Report
from trocar_server.spool.spool_errors import (
    SpoolError,
    SpoolFullError,
    SpoolReadError,
    read_error,
    write_error,
)

_UNUSUAL = re.compile(r"[^A-Za-z0-9_.]+")
_LONGEST_NAME = 64


class Disk:
    """Writes and reads the bytes of blocks. Thread-safe for reading; only one thread may write.

    Args:
        parent: Where the process's own folder is made.
        ahead_bytes: The most bytes of buffers that are kept to be used again.
        options: Disk options.
        report: Takes notes for the user.
    """

    def __init__(self, parent: Path, ahead_bytes: int, options: DiskOptions, report: Report) -> None:
        self.buffers = BufferPool(ahead_bytes)
        self.pool = ChunkPool(parent, options.quota_bytes, report.note)
        self._options = options

    def transfer(self) -> Transfer:
        """Return a transfer, for one thread."""
        return Transfer(self._options.checksum)

    def write(self, block: Block, transfer: Transfer) -> Place:
        """Write a block that is in memory; returns where it is now.

        Raises:
            SpoolError: There is no room, or the disk is failing.
        """
        storage = block.storage
        assert storage is not None
        try:
            if block.ready is not None:
                block.ready()
            source = storage_bytes(storage, block.byte_count)
            encoding = self._options.encoding.choose(source, block.dtype)
            size = encoding.stored_bytes(block.byte_count)
            item = _item(block, encoding, size)
            address = storage.data_ptr()
            chunk, offset = self.pool.place(item, phase_of(address, encoding))
            try:
                try:
                    return transfer.write(chunk, offset, source, address, encoding)
                except OSError as error:
                    if not isinstance(write_error(error), SpoolFullError) or not self.pool.drop_free():
                        raise
                return transfer.write(chunk, offset, source, address, encoding)  # in the room of free files
            except BaseException:
                self.pool.leave(chunk)
                raise
        except SpoolError:
            raise
        except Exception as error:
            raise write_error(error) from error

    def read(self, block: Block, transfer: Transfer) -> torch.UntypedStorage:
        """Return the bytes of a block that was written, as a storage.

        Raises:
            SpoolError: The file is gone, short or altered, or the disk is failing.
        """
        place = block.place
        if place is None:
            raise SpoolReadError("the graph was dropped while its saved tensors were read")
        try:
            return transfer.read(place, block.byte_count, self.buffers)
        except Exception as error:
            if block.place is place:  # otherwise the graph was dropped meanwhile, and the file reused
                self.pool.condemn(place.chunk)
            if isinstance(error, SpoolError):
                raise
            raise read_error(error) from error

    def forget(self) -> None:
        """Forget all files without touching the disk: in a forked process they are the parent's."""
        self.pool.forget()

    def close(self) -> None:
        """Remove all files."""
        self.pool.close()

    def abandon(self) -> None:
        """Remove all files, waiting for no lock."""
        self.pool.abandon()


def _item(block: Block, encoding: Encoding, byte_count: int) -> Item:
    """Describe a block for the header of its file."""
    made = _UNUSUAL.sub("-", block.label.made)[:_LONGEST_NAME] or "no-operation"
    name = f"step-{block.step:06d}-block-{block.number:06d}-{made}"
    shape = None if encoding.kind is Kind.BITS else block.label.shape
    remark = encoding.remark
    return Item(name, encoding.stored_dtype, 0, byte_count, remark, block.step, block.number, shape)
