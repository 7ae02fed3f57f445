"""A ledger that checks its own sums and bounds after every change, for tests of the spool."""

from typing import Any

import torch

from trocar_server.spool.blocks.ledger import Ledger
from trocar_server.spool.files.entries import Block, EntryState

_IN_MEMORY = (EntryState.HELD, EntryState.QUEUED, EntryState.WRITING)


class AuditedLedger(Ledger):
    """Notes in `failures` where a sum is wrong or a bound is broken; see Note: [Memory bound] in `ledger`."""

    def __init__(self, budget_bytes: int, ahead_bytes: int) -> None:
        super().__init__(budget_bytes, ahead_bytes)
        self.failures: list[str] = []
        self._all: dict[int, Block] = {}
        self._busy: dict[int, Block] = {}  # being written or read
        self._largest_ever = 0
        self._has_failed = False

    def add(self, block: Block) -> None:
        self._all[block.number] = block
        self._largest_ever = max(self._largest_ever, block.byte_count)
        super().add(block)
        self._has_failed = False
        self._audit()

    def next_to_write(self) -> Block | None:
        block = super().next_to_write()
        if block is not None:
            self._busy[block.number] = block
        self._audit()
        return block

    def written(self, block: Block) -> None:
        super().written(block)
        del self._busy[block.number]
        self._audit()

    def not_written(self, block: Block) -> None:
        super().not_written(block)
        self._has_failed = True
        del self._busy[block.number]
        self._audit()

    def begin_reading(self, block: Block) -> None:
        super().begin_reading(block)
        self._busy[block.number] = block
        self._audit()

    def loaded(self, block: Block, storage: torch.UntypedStorage | None) -> None:
        super().loaded(block, storage)
        del self._busy[block.number]
        self._audit()

    def drop(self, block: Block) -> None:
        super().drop(block)
        del self._all[block.number]
        self._audit()

    def next_to_read(self) -> Block | None:
        block = super().next_to_read()
        if block is not None:
            ahead = self.loaded_bytes + block.byte_count
            self._expect(ahead <= self._ahead or self.loaded_bytes == 0, f"reads {ahead} bytes ahead")
            self._expect(
                self.memory_bytes + block.byte_count <= self.budget_bytes, "reads ahead over the budget"
            )
        return block

    def _audit(self) -> None:
        blocks = {**self._all, **self._busy}.values()
        taken = {number: block for number, block in self._busy.items() if block.storage is None}
        in_memory = sum(block.byte_count for block in blocks if block.storage is not None)
        in_memory += sum(block.byte_count for block in taken.values())
        self._expect(in_memory == self.memory_bytes, f"{in_memory} bytes in memory, not {self.memory_bytes}")
        staying = sum(block.byte_count for block in self._all.values() if block.state is EntryState.HELD)
        self._expect(staying <= self.budget_bytes or self._has_failed, f"{staying} bytes stay")
        bound = self.budget_bytes + self._largest_ever
        self._expect(self.memory_bytes <= bound, f"{self.memory_bytes} bytes over {bound}")
        live = sum(block.byte_count for block in self._all.values())
        self._expect(live == self.live_bytes, f"{live} bytes needed, not {self.live_bytes}")
        for block in self._all.values():
            has_storage = block.state in (*_IN_MEMORY, EntryState.LOADED)
            self._expect(has_storage == (block.storage is not None), f"{block.state} without its bytes")

    def _expect(self, holds: Any, otherwise: str) -> None:
        if not holds:
            self.failures.append(otherwise)
