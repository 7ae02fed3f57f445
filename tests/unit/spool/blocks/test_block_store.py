"""The store under threads, the garbage collector and a disk that takes its time."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.spool.spool_audit import AuditedLedger
from tests.unit.spool.steps import wait_for
from trocar_server.spool import Spool, SpoolError, SpoolReadError
from trocar_server.spool.blocks import block_store as store_module
from trocar_server.spool.blocks.blocks import Blocks
from trocar_server.spool.blocks.traffic import Traffic
from trocar_server.spool.files.block_transfer import Transfer
from trocar_server.spool.files.entries import EntryState
from trocar_server.spool.saved.saved import Saved


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spool]:
    """A spool with room for two blocks of `tensor` that may read one ahead, and an eye on its sums."""
    monkeypatch.setattr(store_module, "Ledger", AuditedLedger)
    opened = Spool(tmp_path, 2 * 4000, min_bytes=100, ahead_bytes=4000)
    yield opened
    ledger = opened.store.ledger
    assert isinstance(ledger, AuditedLedger)
    assert ledger.failures == []
    opened.close()


def tensor() -> torch.Tensor:
    return torch.randn(1000)


class Gate:
    """Lets the writer go on only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self._goes_on = threading.Semaphore(0), threading.Semaphore(0)
        write = Transfer.write

        def waited(*arguments: Any) -> Any:
            self.entered.release()
            assert self._goes_on.acquire(timeout=60)
            return write(*arguments)

        monkeypatch.setattr(Transfer, "write", waited)

    def open(self, count: int = 1000) -> None:
        self._goes_on.release(count)


def run(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_who_saves_waits_for_the_writer(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    held = [spool.packer.pack(tensor()) for _ in range(3)]
    assert gate.entered.acquire(timeout=60)
    thread = run(lambda: held.append(spool.packer.pack(tensor())))
    wait_for(spool, lambda: spool.store.blocks.waiting_count == 1)
    assert len(held) == 3
    gate.open()
    thread.join(60)
    assert len(held) == 4
    assert spool.report().stall_count == 1


def test_what_somebody_drops_makes_room_for_who_waits(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    held = [spool.packer.pack(tensor()) for _ in range(3)]
    assert gate.entered.acquire(timeout=60)
    thread = run(lambda: held.append(spool.packer.pack(tensor())))
    wait_for(spool, lambda: spool.store.blocks.waiting_count == 1)
    del held[1]
    thread.join(60)
    assert not thread.is_alive()
    gate.open()


def test_two_threads_that_save_one_storage_share_a_block(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    held = [spool.packer.pack(tensor()) for _ in range(3)]
    assert gate.entered.acquire(timeout=60)
    shared = tensor()
    threads = [run(lambda: held.append(spool.packer.pack(shared))) for _ in range(4)]
    wait_for(spool, lambda: spool.store.blocks.waiting_count == 4)
    gate.open()
    for thread in threads:
        thread.join(60)
    assert spool.report().unique_bytes == 4 * 4000
    assert all(torch.equal(one.unpack(), shared) for one in held[3:])


def test_a_block_is_read_once_for_all_who_ask(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    value = tensor()
    first = spool.packer.pack(value)
    others = [spool.packer.pack(tensor()) for _ in range(3)]
    wait_for(spool, lambda: not spool.store.ledger.pending_bytes)
    entered, goes_on, read = threading.Semaphore(0), threading.Semaphore(0), Transfer.read

    def slow(*arguments: Any) -> Any:
        entered.release()
        assert goes_on.acquire(timeout=60)
        return read(*arguments)

    monkeypatch.setattr(Transfer, "read", slow)
    found: list[torch.Tensor] = []
    threads = [run(lambda: found.append(first.unpack())) for _ in range(3)]
    assert entered.acquire(timeout=60)
    wait_for(spool, lambda: spool.store.blocks.waiting_count == 2)
    goes_on.release()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(one, value) for one in found)
    assert not entered.acquire(blocking=False)
    del others


def test_the_garbage_collector_may_come_while_the_lock_is_held(spool: Spool) -> None:
    class Cycle:
        def __init__(self, held: object) -> None:
            self.me, self.held = self, held

    for _ in range(20):
        Cycle(spool.packer.pack(tensor()))
    blocks, ledger = spool.store.blocks, spool.store.ledger
    with blocks:
        gc.collect()
        assert blocks.released
        assert not ledger.is_empty
    wait_for(spool, lambda: ledger.is_empty)
    assert not blocks.by_key


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Blocks, "collect"),
        (Blocks, "find"),
        (Blocks, "add"),
        (Blocks, "_drop"),
        (Blocks, "notify"),
        (Traffic, "poke_writer"),
        (Traffic, "poke_reader"),
    ],
)
def test_the_garbage_collector_may_come_at_every_step(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, kind: type, name: str
) -> None:
    inner = getattr(kind, name)
    cycles: list[object] = []

    def collecting(*arguments: Any) -> Any:
        if cycles:
            cycles.pop()
            gc.collect(0)
        return inner(*arguments)

    monkeypatch.setattr(kind, name, collecting)
    held: list[Any] = []
    kept = None
    for _ in range(30):
        held = [spool.packer.pack(tensor())]
        held.append(held)
        cycles.append(held)
        value = tensor()
        kept = spool.packer.pack(value)
        assert torch.equal(kept.unpack(), value)
    cycles.clear()
    del held, kept
    gc.collect()
    assert spool.store.ledger.is_empty


def test_files_are_left_to_others_by_the_garbage_collector(spool: Spool) -> None:
    """It may come while its thread holds the lock of the files."""
    held = [spool.packer.pack(tensor()) for _ in range(6)]
    wait_for(spool, lambda: not spool.store.ledger.pending_bytes)
    with spool.store.disk.pool._lock:
        held.clear()
        assert spool.store.ledger.is_empty


def test_the_last_reference_may_go_in_any_thread(spool: Spool) -> None:
    boxes = [[spool.packer.pack(tensor())] for _ in range(40)]
    threads = [run(box.clear) for box in boxes]
    for thread in threads:
        thread.join(60)
    assert spool.store.ledger.is_empty


def test_a_block_that_goes_while_it_is_written_leaves_no_trace(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    held = [spool.packer.pack(tensor()) for _ in range(3)]
    assert gate.entered.acquire(timeout=60)
    held.clear()
    ledger = spool.store.ledger
    assert (ledger.is_empty, ledger.memory_bytes) == (True, 4000)
    gate.open()
    wait_for(spool, lambda: not ledger.memory_bytes)


def test_backward_uses_from_memory_what_waits_for_the_writer(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    values = [tensor() for _ in range(3)]
    held = [spool.packer.pack(value) for value in values]
    assert gate.entered.acquire(timeout=60)
    assert torch.equal(held[0].unpack(), values[0])
    assert spool.report().read_bytes == 0
    gate.open()


def test_after_closing_what_was_in_memory_is_there_still(spool: Spool) -> None:
    values = [tensor() for _ in range(5)]
    held = [spool.packer.pack(value) for value in values]
    wait_for(spool, lambda: not spool.store.ledger.pending_bytes)
    spool.close()
    spool.close()
    assert torch.equal(held[4].unpack(), values[4])
    with pytest.raises(SpoolReadError, match="the spool was closed"):
        held[0].unpack()
    with pytest.raises(SpoolError, match="the spool is closed"):
        spool.packer.pack(tensor())


def test_closing_wakes_who_waits(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    held = [spool.packer.pack(tensor()) for _ in range(3)]
    errors: list[BaseException] = []

    def save() -> None:
        try:
            spool.packer.pack(tensor())
        except SpoolError as error:
            errors.append(error)

    thread = run(save)
    wait_for(spool, lambda: spool.store.blocks.waiting_count == 1)
    closing = run(spool.close)
    thread.join(60)
    assert len(errors) == 1
    gate.open()
    closing.join(60)
    assert len(held) == 3


def test_threads_and_files_go_with_the_last_graph(tmp_path: Path) -> None:
    opened = Spool(tmp_path, 0, min_bytes=100)
    held = opened.packer.pack(tensor())
    ledger = opened.store.ledger
    wait_for(opened, lambda: not ledger.pending_bytes)
    traffic = opened.store.traffic
    workers = traffic.writer, traffic.reader
    del traffic
    del opened
    gc.collect()
    assert list(tmp_path.iterdir()) != []
    del held
    gc.collect()
    for worker in workers:
        assert worker is not None
        worker.join(60)
        assert not worker.is_alive
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_read_leaves_the_block_on_disk(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [tensor() for _ in range(4)]
    held = [spool.packer.pack(value) for value in values]
    wait_for(spool, lambda: not spool.store.ledger.pending_bytes)
    saved = held[0]
    assert isinstance(saved, Saved)
    block = saved.block

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            held[0].unpack()
    assert block.state is EntryState.STORED
    assert torch.equal(held[0].unpack(), values[0])
