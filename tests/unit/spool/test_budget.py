"""How much memory saved tensors take, and what is written: of real steps, with an eye on every change."""

import gc
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.spool.spool_audit import AuditedLedger
from tests.unit.spool.steps import are_equal, batch, gradients, open_spool, small_model, wait_until_written
from trocar_server.spool import Spool
from trocar_server.spool.blocks import block_store as store_module

LARGEST = 16 * 8 * 16 * 16 * 4
"""The largest block of a step of `small_model`; there are four of them and a smaller one."""

TOTAL = 4 * LARGEST + 16 * 3 * 16 * 16 * 4


@pytest.fixture(autouse=True)
def _audited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "Ledger", AuditedLedger)


def assert_kept(spool: Spool) -> None:
    ledger = spool.store.ledger
    assert isinstance(ledger, AuditedLedger)
    assert ledger.failures == []
    assert ledger.is_empty


@pytest.mark.parametrize("ahead_bytes", [0, LARGEST, 10 * LARGEST])
@pytest.mark.parametrize("budget_bytes", [0, 1, LARGEST // 2, LARGEST, 2 * LARGEST + 1, TOTAL - 1, TOTAL])
def test_memory_stays_within_the_budget_and_one_block(
    tmp_path: Path, budget_bytes: int, ahead_bytes: int
) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path, budget_bytes, ahead_bytes=ahead_bytes) as spool:
        for _ in range(3):
            assert are_equal(gradients(model, spool), expected)
            assert_kept(spool)
        report = spool.report()
        assert report.unique_bytes == 3 * TOTAL
        assert report.peak_bytes <= budget_bytes + LARGEST
        if budget_bytes == TOTAL:
            assert report.written_bytes == 0
        elif budget_bytes + LARGEST < TOTAL:  # else backward may begin before the writer has
            assert report.written_bytes > 0
        assert report.read_bytes <= report.written_bytes


def test_what_fits_is_never_written(tmp_path: Path) -> None:
    model = small_model()
    with open_spool(tmp_path, TOTAL) as spool:
        for _ in range(5):
            gradients(model, spool)
        assert list(tmp_path.iterdir()) == []
        assert spool.store.traffic.writer is None


def test_no_more_is_written_than_must_be(tmp_path: Path) -> None:
    """In the first step the writer may be too late to be taken back; later ones know what cannot stay."""
    model = small_model()
    with open_spool(tmp_path, 2 * LARGEST) as spool:
        gradients(model, spool)
        before = spool.report().written_bytes
        gradients(model, spool)
        assert spool.report().written_bytes - before <= TOTAL - 2 * LARGEST + LARGEST + 8 * 4096


def test_a_graph_that_is_retained_and_run_again(tmp_path: Path) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path, LARGEST, ahead_bytes=LARGEST) as spool:
        with spool:
            loss = model(batch()).square().sum()
        for _ in range(4):
            model.zero_grad()
            loss.backward(retain_graph=True)
            assert are_equal([p.grad for p in model.parameters() if p.grad is not None], expected)
        del loss
        assert_kept(spool)
        assert spool.report().peak_bytes <= 2 * LARGEST


def test_forward_and_backward_in_several_threads_at_once(tmp_path: Path) -> None:
    failures: list[str] = []
    with open_spool(tmp_path, LARGEST, ahead_bytes=LARGEST) as spool:

        def train(seed: int) -> None:
            model = small_model()
            expected = gradients(model)
            for _ in range(6):
                if not are_equal(gradients(model, spool), expected):
                    failures.append(f"thread {seed}")

        threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert_kept(spool)
        assert spool.report().peak_bytes <= 2 * LARGEST


def test_backward_while_another_forward_pass_saves(tmp_path: Path) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path, LARGEST) as spool:
        losses = []
        for _ in range(4):
            with spool:
                losses.append(model(batch()).square().sum())
        model.zero_grad()
        thread = threading.Thread(target=lambda: [loss.backward() for loss in losses[:1]])
        thread.start()
        with spool:
            other = model(batch()).square().sum()
        thread.join()
        assert are_equal([p.grad for p in model.parameters() if p.grad is not None], expected)
        model.zero_grad()
        other.backward()
        assert are_equal([p.grad for p in model.parameters() if p.grad is not None], expected)
        losses.clear()
        del other
        assert_kept(spool)


def test_memory_is_free_when_backward_is_over(tmp_path: Path) -> None:
    model = small_model()
    with open_spool(tmp_path, LARGEST) as spool:
        gradients(model, spool)
        wait_until_written(spool)
        assert spool.store.ledger.memory_bytes == 0


def test_the_memory_of_what_is_on_disk_is_free(tmp_path: Path) -> None:
    gc.collect()
    x = torch.randn(1000, requires_grad=True)
    with open_spool(tmp_path) as spool:
        with spool:
            y = x * 2
            storages = []
            for _ in range(6):
                storages.append(StorageWeakRef(y.untyped_storage()))
                y = y.tanh().mul(0.9)
        wait_until_written(spool)
        assert [storage.expired() for storage in storages] == [True] * 6
        y.sum().backward()


def test_views_of_one_storage_are_read_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(300, 300)
    with open_spool(tmp_path) as spool:
        x = torch.randn(300, 300)
        with spool:
            y = x * 1
            loss = layer(y).sum() + layer(y.T).sum() + layer(y[:200]).sum()
            del y
        wait_until_written(spool)
        loss.backward()
        report = spool.report()
        assert report.unique_bytes == x.nbytes
        assert report.written_bytes <= x.nbytes + 4096
        assert report.read_bytes == report.written_bytes
