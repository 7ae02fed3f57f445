"""The rules of what is in memory, step by step; bounds over random programs are in `test_random_graphs`."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from trocar_server.spool.blocks.ledger import Ledger
from trocar_server.spool.files.entries import Block, EntryState


class Steps:
    """Blocks of a ledger, by number, with the work of both threads done at once or on demand."""

    def __init__(self, budget_bytes: int, ahead_bytes: int = 1_000) -> None:
        self.ledger = Ledger(budget_bytes, ahead_bytes)
        self.blocks: dict[int, Block] = {}

    def save(self, *sizes: int) -> list[Block]:
        return [self._save(size) for size in sizes]

    def _save(self, size: int) -> Block:
        storage = torch.UntypedStorage(size)
        while not self.ledger.make_room(size):
            self.write()
        number = len(self.blocks) + 1
        block = Block(number, size, torch.uint8, number, StorageWeakRef(storage), storage)
        self.blocks[number] = block
        self.ledger.add(block)
        return block

    def write(self, count: int = 1) -> list[int]:
        """Write the blocks that wait, so many at most; returns which."""
        written = []
        for _ in range(count):
            block = self.ledger.next_to_write()
            if block is not None:
                self.ledger.written(block)
                written.append(block.number)
        return written

    def read(self, block: Block) -> None:
        assert self.ledger.make_room_to_read(block)
        self.ledger.begin_reading(block)
        self.ledger.loaded(block, torch.UntypedStorage(block.byte_count))

    def read_ahead(self) -> list[int]:
        found = []
        while (block := self.ledger.next_to_read()) is not None:
            self.ledger.begin_reading(block)
            self.ledger.loaded(block, torch.UntypedStorage(block.byte_count))
            found.append(block.number)
        return found

    def ask(self, block: Block) -> None:
        self.ledger.ask(block)
        if block.storage is None:
            self.read(block)

    def states(self) -> str:
        """One letter a block: Held, Queued, Writing, Stored, Reading, Loaded, Gone."""
        return "".join(block.state.name[0] for block in self.blocks.values())


def test_nothing_is_written_while_all_fits() -> None:
    steps = Steps(budget_bytes=300)
    steps.save(100, 100, 100)
    assert steps.states() == "HHH"


def test_the_oldest_are_written_when_memory_runs_over() -> None:
    steps = Steps(budget_bytes=300)
    steps.save(100, 100, 100, 100)
    assert steps.states() == "QHHH"
    steps.save(150)
    assert steps.states() == "SQQHH"
    assert steps.ledger.peak_bytes <= 300 + 150


def test_who_brings_another_block_waits_at_budget_plus_the_largest() -> None:
    steps = Steps(budget_bytes=300)
    steps.save(100, 100, 100, 100)
    assert not steps.ledger.make_room(100)
    steps.write()
    assert steps.ledger.make_room(100)


@pytest.mark.parametrize("budget_bytes", [0, 100])
def test_a_block_over_the_budget_is_written_at_once(budget_bytes: int) -> None:
    steps = Steps(budget_bytes)
    steps.save(500)
    assert steps.states() == "Q"
    steps.save(30)
    assert steps.states() == ("SQ" if budget_bytes == 0 else "QH")
    assert steps.ledger.peak_bytes <= budget_bytes + 500


def test_what_waits_for_the_writer_is_used_from_memory_newest_first() -> None:
    steps = Steps(budget_bytes=300)
    blocks = steps.save(100, 100, 100)
    first = steps.ledger.peak_bytes
    for block in blocks:
        steps.ledger.drop(block)
    assert first == 300
    steps = Steps(budget_bytes=250)
    blocks = steps.save(100, 100, 100)
    assert steps.states() == "QHH"
    steps.ledger.drop(blocks[2])
    steps.ledger.ask(blocks[1])
    assert steps.states() == "HHG"
    assert steps.write() == []


def test_what_does_not_fit_is_written_also_in_backward() -> None:
    steps = Steps(budget_bytes=100)
    blocks = steps.save(60, 40, 60)
    assert steps.states() == "QHH"
    steps.ledger.ask(blocks[2])
    assert steps.states() == "QHH"
    assert steps.write() == [1]


def test_the_step_before_tells_what_cannot_stay() -> None:
    steps = Steps(budget_bytes=300)
    for block in steps.save(100, 100, 100, 100, 100):
        steps.ledger.ask(block)
        steps.ledger.drop(block)
    steps.save(100, 100, 100, 100, 100)
    assert steps.states()[5:] == "SQHHH"
    steps = Steps(budget_bytes=300)
    for block in reversed(steps.save(100, 100, 100)):
        steps.ledger.ask(block)
        steps.ledger.drop(block)
    steps.save(100, 100, 100)
    assert steps.states() == "GGGHHH"


def test_a_step_that_ends_without_backward_counts_at_the_next_context() -> None:
    steps = Steps(budget_bytes=200)
    for block in steps.save(100, 100, 100):
        steps.ledger.drop(block)
    steps.ledger.begin_step()
    steps.save(100, 100)
    assert steps.states()[3:] == "QH"


def test_a_part_computed_again_in_backward_is_no_step() -> None:
    steps = Steps(budget_bytes=300)

    def step() -> list[Block]:
        steps.ledger.begin_step()
        blocks = steps.save(100, 100, 100, 100, 100)
        expected = list(blocks)
        while blocks:
            steps.ask(blocks[-1])
            again = steps.save(50)
            steps.ask(again[0])
            steps.ledger.drop(again[0])
            steps.ledger.drop(blocks.pop())
        return expected

    step()
    first = len(steps.blocks)
    steps.ledger.begin_step()
    steps.save(100, 100, 100, 100, 100)
    assert steps.states()[first:] == "SQHHH"


def test_reading_goes_ahead_newest_first_within_the_window() -> None:
    steps = Steps(budget_bytes=400, ahead_bytes=200)
    blocks = steps.save(*[100] * 12)
    steps.write(20)
    assert steps.states() == "SSSSSSSSHHHH"
    steps.ledger.ask(blocks[11])
    assert steps.read_ahead() == []  # the budget is full
    for block in (blocks[11], blocks[10], blocks[9]):
        steps.ledger.drop(block)
    assert steps.read_ahead() == [8, 7]
    steps.ask(blocks[7])
    steps.ledger.drop(blocks[7])
    assert steps.read_ahead() == [6]
    assert steps.ledger.loaded_bytes == 200


def test_a_block_larger_than_the_window_is_read_ahead_alone() -> None:
    steps = Steps(budget_bytes=400, ahead_bytes=100)
    blocks = steps.save(50, 300, 50, 300, 100)
    steps.write(10)
    steps.ledger.ask(blocks[4])
    steps.ledger.drop(blocks[4])
    steps.ledger.drop(blocks[3])
    assert steps.states() == "SSSGG"
    assert steps.read_ahead() == [3]
    steps.ledger.ask(blocks[2])
    steps.ledger.drop(blocks[2])
    assert steps.read_ahead() == [2]
    assert steps.states() == "SLGGG"


def test_a_graph_that_is_retained_is_read_ahead_again() -> None:
    steps = Steps(budget_bytes=200, ahead_bytes=200)
    blocks = steps.save(*[100] * 8)
    steps.write(20)
    for _ in range(3):
        for block in reversed(blocks):
            steps.ask(block)
            steps.read_ahead()
    assert steps.ledger.peak_bytes <= 300
    held = [block for block in blocks if block.state is EntryState.HELD]
    for block in held:
        steps.ledger.drop(block)
    steps.ask(blocks[5])
    assert steps.read_ahead() == [5]


def test_reading_makes_room_by_letting_go_of_what_was_used() -> None:
    steps = Steps(budget_bytes=100, ahead_bytes=0)
    blocks = steps.save(100, 100, 100, 100)
    steps.write(10)
    steps.ask(blocks[2])
    assert steps.states() == "SSLH"
    steps.ask(blocks[1])
    assert steps.states() == "SLSH"


def test_a_new_forward_pass_takes_the_room_of_what_was_read() -> None:
    steps = Steps(budget_bytes=200, ahead_bytes=200)
    blocks = steps.save(100, 100, 100, 100)
    steps.write(10)
    steps.ledger.drop(blocks[3])
    steps.ledger.ask(blocks[2])
    steps.read_ahead()
    assert steps.states() == "SLHG"
    steps.save(100)
    assert steps.states() == "SSHGH"


def test_a_block_that_goes_while_it_is_written_or_read_takes_memory_until_then() -> None:
    steps = Steps(budget_bytes=0)
    (block,) = steps.save(100)
    assert steps.ledger.next_to_write() is block
    steps.ledger.drop(block)
    assert steps.ledger.memory_bytes == 100
    steps.ledger.written(block)
    assert (block.state, block.storage, steps.ledger.memory_bytes) == (EntryState.GONE, None, 0)
    (block,) = steps.save(100)
    steps.write()
    steps.ledger.ask(block)
    steps.ledger.begin_reading(block)
    steps.ledger.drop(block)
    assert steps.ledger.memory_bytes == 100
    steps.ledger.loaded(block, torch.UntypedStorage(100))
    assert (block.state, block.storage, steps.ledger.memory_bytes) == (EntryState.GONE, None, 0)


def test_after_a_fault_all_stays_and_the_oldest_go_first_again() -> None:
    steps = Steps(budget_bytes=100)
    steps.save(100, 100)
    block = steps.ledger.next_to_write()
    assert block is not None
    steps.ledger.not_written(block)
    assert steps.states() == "HH"
    assert steps.ledger.pending_bytes == 0
    steps.ledger.make_room(0)
    assert steps.states() == "QH"


def test_a_fault_of_reading_leaves_the_block_on_disk_and_the_reader_goes_on() -> None:
    steps = Steps(budget_bytes=300)
    blocks = steps.save(*[100] * 6)
    steps.write(10)
    steps.ledger.ask(blocks[5])
    for block in blocks[3:]:
        steps.ledger.drop(block)
    assert steps.ledger.next_to_read() is blocks[2]
    steps.ledger.begin_reading(blocks[2])
    steps.ledger.loaded(blocks[2], None)
    assert steps.ledger.memory_bytes == 0
    assert steps.read_ahead() == [2, 1]


def test_sums_are_zero_in_the_end() -> None:
    steps = Steps(budget_bytes=250, ahead_bytes=150)
    for _ in range(3):
        blocks = steps.save(100, 10, 300, 50, 120)
        for block in reversed(blocks):
            steps.ask(block)
            steps.read_ahead()
            steps.ledger.drop(block)
    ledger = steps.ledger
    assert (ledger.held_bytes, ledger.pending_bytes, ledger.loaded_bytes, ledger.is_empty) == (0, 0, 0, True)


def test_many_blocks_take_no_longer_each_than_few() -> None:
    def operations(count: int) -> int:
        steps = Steps(budget_bytes=count, ahead_bytes=count // 4)
        touched = 0

        def counted(*_: object) -> None:
            nonlocal touched
            touched += 1

        import sys

        sys.setprofile(lambda frame, event, _: counted() if event == "call" else None)
        try:
            for block in reversed(steps.save(*[10] * count)):
                steps.ask(block)
                steps.read_ahead()
                steps.ledger.drop(block)
        finally:
            sys.setprofile(None)
        return touched

    assert operations(2_000) < 2.5 * operations(1_000)
