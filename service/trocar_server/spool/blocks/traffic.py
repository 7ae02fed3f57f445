"""Block I/O threads: a writer, a prefetching reader, and the threads that wait for them."""

import threading
import time

import torch

from trocar_server.spool.blocks.background_thread import Worker
from trocar_server.spool.blocks.blocks import Blocks
from trocar_server.spool.blocks.ledger import Ledger
from trocar_server.spool.files.block_files import Disk
from trocar_server.spool.files.block_transfer import Place, Transfer
from trocar_server.spool.files.direct_memory import padded
from trocar_server.spool.files.encoding import Encoding, Kind
from trocar_server.spool.files.entries import Block, EntryState
from trocar_server.spool.report import Report
from trocar_server.spool.spool_errors import SpoolError, write_error

_REST_S = 1.0
_CLOSE_S = 10.0


class Traffic:
    """Writes blocks to disk and reads them back. The threads start with the first write.

    Args:
        blocks: All blocks.
        ledger: Decides which comes next.
        disk: Their files.
        report: Counts reads and writes.

    Attributes:
        writer: The writer thread; None before the first write.
        reader: The reader thread, likewise.
    """

    def __init__(self, blocks: Blocks, ledger: Ledger, disk: Disk, report: Report) -> None:
        self._blocks, self._ledger, self._disk, self._report = blocks, ledger, disk, report
        self._leaving = threading.Lock()
        self.writer: Worker[Traffic] | None = None
        self.reader: Worker[Traffic] | None = None

    def poke_writer(self) -> None:
        """Wake the writer if blocks are queued. Under the lock."""
        if self._ledger.has_queue():
            if self.writer is None:
                self.writer = Worker(self, Traffic._write_all, "spool-writer", _REST_S)
                self.reader = Worker(self, Traffic._read_ahead, "spool-reader")
                self._blocks.poke_writer, self._blocks.poke_reader = self.writer.poke, self.reader.poke
            self.writer.poke()

    def poke_reader(self) -> None:
        """Wake the reader if blocks are to be prefetched. Under the lock."""
        if self.reader is not None and self._ledger.next_to_read() is not None:
            self.reader.poke()

    def read_now(self, block: Block) -> None:
        """Read a block in this thread, if no other is reading it; the lock is released during the read.

        Raises:
            SpoolError: It cannot be read back.
        """
        self._ledger.begin_reading(block)
        started = time.perf_counter()
        with self._blocks.unlocked():
            error = self._read(block, self._disk.transfer())
        self._report.stalled(time.perf_counter() - started)
        try:
            if error is not None:
                raise error
        finally:
            del error  # otherwise this frame, the error and the callers' tensors form a reference cycle

    def leave_files(self) -> None:
        """Free the disk space of removed blocks. Without the lock."""
        with self._leaving:  # when it is done, what was left before is given back, by whichever thread
            for place in self._blocks.left_places():
                self._disk.pool.leave(place.chunk)

    def end(self) -> None:
        """Stop the threads and wait for them. Without the lock."""
        with self._blocks:
            self._blocks.is_closed = True
            self._blocks.notify()
            workers = [worker for worker in (self.writer, self.reader) if worker is not None]
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.join(_CLOSE_S)

    # --- On the threads ---------------------------------------------------------------------------

    def _write_all(self, is_idle: bool) -> None:
        transfer: Transfer | None = None
        while True:
            self.leave_files()
            with self._blocks:
                block = None if self._blocks.is_closed else self._ledger.next_to_write()
            if block is None:
                break
            transfer = transfer or self._disk.transfer()
            self._write(block, transfer)
        if is_idle:
            self._rest()

    def _write(self, block: Block, transfer: Transfer) -> None:
        try:
            place = self._disk.write(block, transfer)
        except BaseException as error:  # noqa: BLE001 - it comes out of forward or backward
            with self._blocks:
                self._not_written(block, write_error(error))
            return
        with self._blocks:
            self._count_written(place, block.byte_count)
            self._ledger.written(block)
            if block.state is EntryState.GONE:
                self._blocks.leave(place)
            else:
                block.place = place
            self._blocks.notify()
            self.poke_reader()

    def _count_written(self, place: Place, byte_count: int) -> None:
        self._report.written_bytes += padded(place.byte_count)
        encoding: Encoding = place.encoding
        if encoding.is_lossy:
            self._report.lossy_bytes += byte_count
        elif encoding.kind is Kind.BITS:
            self._report.packed_bytes += byte_count

    def _not_written(self, block: Block, error: SpoolError) -> None:
        """After a fault: queued blocks stay in memory, and the files are removed with their graphs."""
        self._ledger.not_written(block)
        self._disk.pool.condemn()
        self._blocks.fail(block, error)
        self._report.note(str(error))
        self._blocks.notify()

    def _read_ahead(self, _: bool) -> None:
        transfer: Transfer | None = None
        while True:
            with self._blocks:
                self._blocks.collect()
                block = None if self._blocks.is_closed else self._ledger.next_to_read()
                if block is None:
                    return
                self._ledger.begin_reading(block)
            transfer = transfer or self._disk.transfer()
            self._read(block, transfer)  # the thread that needs it tries again, and gets the error
            del block

    def _read(self, block: Block, transfer: Transfer) -> SpoolError | None:
        """Read a block in state READING; returns what went wrong."""
        storage: torch.UntypedStorage | None = None
        error: SpoolError | None = None
        try:
            storage = self._disk.read(block, transfer)
        except SpoolError as raised:
            error = raised.with_traceback(None)  # which keeps this frame alive
        finally:  # an interrupt propagates unchanged
            with self._blocks:
                self._report.read_bytes += padded(block.byte_count) if storage is not None else 0
                self._ledger.loaded(block, storage)
                if error is not None and block.state is not EntryState.GONE:
                    self._report.note(str(error))
                self._blocks.notify()
        return error

    def _rest(self) -> None:
        """Handle an idle period."""
        with self._blocks:
            self._blocks.collect()
            has_loaded = self._ledger.loaded_bytes > 0
        if not has_loaded:
            self._disk.buffers.clear()
        try:
            self._disk.pool.rest(time.monotonic())
        except OSError as error:
            self._report.note(str(write_error(error)))
