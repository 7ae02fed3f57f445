"""Blocks on disk: written to files of the pool, read into recycled buffers. Knows no budget and no order."""

from pathlib import Path

import torch

from trocar_server.spool.entries import Block
from trocar_server.spool.errors import SpoolError, SpoolFullError, SpoolReadError, read_error, write_error
from trocar_server.spool.header import Item
from trocar_server.spool.memory import BufferPool, storage_bytes
from trocar_server.spool.options import DiskOptions
from trocar_server.spool.pool import ChunkPool
from trocar_server.spool.report import Report
from trocar_server.spool.transfer import Place, Transfer, phase_of


class Disk:
    """Writes and reads the bytes of blocks, for any thread; only one may write.

    Args:
        parent: Where the process's own folder is made.
        ahead_bytes: The most bytes of buffers that are kept to be used again.
        options: How blocks are kept on disk.
        report: Takes what the user should know.
    """

    def __init__(self, parent: Path, ahead_bytes: int, options: DiskOptions, report: Report) -> None:
        self.buffers = BufferPool(ahead_bytes)
        self.pool = ChunkPool(parent, options.quota_bytes, report.note)
        self._options = options

    def transfer(self) -> Transfer:
        """Return what one thread needs to write or read."""
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
            item = Item(f"{block.number}", encoding.stored_dtype, 0, size, encoding.remark)
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
            if block.place is place:  # else the graph was dropped meanwhile, and the file used anew
                self.pool.condemn(place.chunk)
            if isinstance(error, SpoolError):
                raise
            raise read_error(error) from error

    def forget(self) -> None:
        """Let go of everything and leave the disk alone: in a forked process the files are its parent's."""
        self.pool.forget()

    def close(self) -> None:
        """Remove all files."""
        self.pool.close()
