"""Disks that fill up, fail, or change what they hold: the step fails with the cause, the next one works."""

import contextlib
import errno
import gc
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.support.files.scale import count
from tests.unit.spool.steps import (
    are_equal,
    batch,
    failure,
    files,
    gradients,
    open_spool,
    small_model,
    wait_for,
    wait_until_written,
)
from trocar_server.spool import SpoolError, SpoolFullError, SpoolReadError
from trocar_server.spool.files.chunks import HEADER_BYTES

pwritev, preadv = os.pwritev, os.preadv
Fault = Callable[[pytest.MonkeyPatch], None]


def failing_writes(code: int, after: int) -> Fault:
    """Let writes fail once a step has written so many bytes."""

    def install(patch: pytest.MonkeyPatch) -> None:
        written = 0

        def write(number: int, buffers: Sequence[memoryview], offset: int) -> int:
            nonlocal written
            written += sum(buffer.nbytes for buffer in buffers)
            if written > after:
                raise OSError(code, os.strerror(code))
            return pwritev(number, buffers, offset)

        patch.setattr(os, "pwritev", write)

    return install


def failing_reads(code: int, after: int) -> Fault:
    """Let reads fail after so many."""

    def install(patch: pytest.MonkeyPatch) -> None:
        count = 0

        def read(number: int, buffers: Sequence[memoryview], offset: int) -> int:
            nonlocal count
            count += 1
            if count > after:
                raise OSError(code, os.strerror(code))
            return preadv(number, buffers, offset)

        patch.setattr(os, "preadv", read)

    return install


FAULTS = {
    "disk full at once": (failing_writes(errno.ENOSPC, 0), SpoolFullError, "No space left on device"),
    "disk full in the step": (
        failing_writes(errno.ENOSPC, 400_000),
        SpoolFullError,
        "No space left on device",
    ),
    "disk quota": (failing_writes(errno.EDQUOT, 200_000), SpoolFullError, "quota exceeded"),
    "write error": (failing_writes(errno.EIO, 300_000), SpoolError, "cannot write .* Input/output error"),
    "read error": (failing_reads(errno.EIO, 0), SpoolReadError, "cannot read .* Input/output error"),
    "later read error": (failing_reads(errno.EIO, 2), SpoolReadError, "cannot read .* Input/output error"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_the_step_and_nothing_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install, kind, message = FAULTS[name]
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path) as spool:
        for _ in range(3):
            with monkeypatch.context() as patch:
                install(patch)
                with pytest.raises(kind, match=message):
                    gradients(model, spool)
            gc.collect()
            wait_until_written(spool)
            spool.report()
            assert files(tmp_path) == []
            assert are_equal(gradients(model, spool), expected)
        assert any(message.split()[-1] in note for note in spool.report().notes)


def test_the_cause_is_attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_writes(errno.EIO, 0)(monkeypatch)
    with open_spool(tmp_path) as spool, pytest.raises(SpoolError) as caught:
        gradients(small_model(), spool)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EIO


def test_an_error_holds_no_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    gc.collect()
    gc.disable()  # nothing may wait for it
    try:
        with open_spool(tmp_path) as spool:
            for fault in FAULTS.values():
                with monkeypatch.context() as patch:
                    fault[0](patch)
                    assert failure(SpoolError, model, spool)
                wait_until_written(spool)
                spool.report()
                assert files(tmp_path) == []
    finally:
        gc.enable()


def test_fifty_failed_steps_leave_no_file_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path) as spool:
        for step in range(50):
            with monkeypatch.context() as patch:
                failing_writes(errno.ENOSPC, step * 10_000)(patch)
                assert "No space left" in failure(SpoolFullError, model, spool)
            wait_until_written(spool)
            spool.report()
            assert spool.store.ledger.memory_bytes == 0
        assert files(tmp_path) == []
        assert are_equal(gradients(model, spool), expected)


@pytest.mark.parametrize("seed", range(count(20, "TROCAR_SPOOL_FAULTS")))
def test_steps_among_random_faults_are_exact_or_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    likelihood = chance.choice([0.0, 0.05, 0.2])

    def fail_sometimes(number: int, buffers: Sequence[memoryview], offset: int) -> int:
        if chance.random() < likelihood:
            code = chance.choice([errno.ENOSPC, errno.EIO, errno.EINVAL])
            raise OSError(code, os.strerror(code))
        return pwritev(number, buffers, offset)

    def read_sometimes(number: int, buffers: Sequence[memoryview], offset: int) -> int:
        if chance.random() < likelihood:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(number, buffers, offset)

    model = small_model()
    expected = gradients(model)
    budget = chance.choice([0, 100_000, 300_000])
    with open_spool(tmp_path, budget, checksum=chance.random() < 0.5) as spool:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fail_sometimes)
            patch.setattr(os, "preadv", read_sometimes)
            for _ in range(12):
                with contextlib.suppress(SpoolError):
                    assert are_equal(gradients(model, spool), expected)
        wait_until_written(spool)
        wait_for(spool, lambda: spool.store.ledger.memory_bytes == 0)  # a read may be under way
        assert are_equal(gradients(model, spool), expected)


def test_an_error_of_a_step_that_was_dropped_is_not_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(1000, requires_grad=True)
    with open_spool(tmp_path) as spool:
        with monkeypatch.context() as patch:
            failing_writes(errno.EIO, 0)(patch)
            with spool:
                result = (x * 2).tanh()
            wait_for(spool, lambda: spool.store.blocks.error is not None)
        del result
        with spool:
            loss = x.tanh().sum()
        loss.backward()


def test_a_late_error_comes_out_of_backward_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000, requires_grad=True)
    with open_spool(tmp_path) as spool:
        with monkeypatch.context() as patch:
            failing_writes(errno.EIO, 0)(patch)
            with spool:
                loss = (x * 2).tanh().sum()
            wait_for(spool, lambda: spool.store.blocks.error is not None)
        with pytest.raises(SpoolError, match="Input/output error"):
            loss.backward(retain_graph=True)
        loss.backward()  # it is all in memory still
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad((x * 2).tanh().sum(), x)[0])


def test_the_room_of_free_files_is_used_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 700_000

    def write(number: int, buffers: Sequence[memoryview], offset: int) -> int:
        grown = max(os.fstat(number).st_size, offset + sum(buffer.nbytes for buffer in buffers))
        others = sum(path.stat().st_size for path in files(tmp_path)) - os.fstat(number).st_size
        if grown + others > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwritev(number, buffers, offset)

    monkeypatch.setattr(os, "pwritev", write)
    with open_spool(tmp_path) as spool:
        for count in (100_000, 110_000, 120_000):
            x = torch.randn(count, requires_grad=True)
            with spool:
                first = (x * 2).tanh()
            with spool:
                second = (x * 3)[:5000].tanh()  # keeps a file of its own open
            first.sum().backward()
            second.sum().backward()


def test_a_quota_fails_the_step_that_needs_more(tmp_path: Path) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path, quota_bytes=HEADER_BYTES + 300_000) as spool:
        for _ in range(3):
            with pytest.raises(SpoolFullError, match="over 431,072 bytes on disk, the quota"):
                gradients(model, spool)
            gc.collect()
            wait_until_written(spool)
            spool.report()
            assert files(tmp_path) == []
            x = torch.randn(1000, requires_grad=True)
            with spool:
                loss = x.tanh().square().sum()
            loss.backward()
    with open_spool(tmp_path, quota_bytes=2 << 20) as spool:
        for _ in range(5):
            assert are_equal(gradients(model, spool), expected)
        assert spool.report().disk_peak_bytes <= 2 << 20


def test_a_spool_that_is_closed_says_so(tmp_path: Path) -> None:
    with open_spool(tmp_path) as spool:
        with spool:
            loss = small_model()(batch()).square().sum()
        wait_until_written(spool)
    with pytest.raises(SpoolError, match="the spool was closed"):
        loss.backward()
