"""A limit to freed memory: what is freed is used again, and what is more than the limit goes back."""

import ctypes
import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.spool.spool_processes import Processes
from trocar_server.spool import freed_memory, heaps, limit_freed_memory
from trocar_server.spool.freed_memory import FreedMemory

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own figures")

RESIDENT = """
import os
import sys
from pathlib import Path
import torch
from trocar_server.spool import limit_freed_memory
from trocar_server.spool.freed_memory import freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

if not limit_freed_memory("16MiB"):
    sys.exit(0)
limit = freed_memory()

def later():
    # Two steps later the memory that was needed before counts no longer.
    limit.check()
    limit.begin_step()
    limit.begin_step()
    limit.check()
"""

SCATTERED = """
kept, freed = [], []
before = resident()
for _ in range(50):
    kept.append(torch.ones(1 << 18))  # 1 MiB
    freed.append(torch.ones(4 << 18))  # 4 MiB
most, trims = resident() - before, limit.trim_count
freed.clear()
later()
print(most, resident() - before, limit.trim_count - trims)
assert all((tensor == 1).all() for tensor in kept)
"""

WITHIN = """
torch.ones(2 << 18)  # code and threads that the first tensor brings into memory are no freed memory
limit_freed_memory("16MiB")
limit = freed_memory()
trims = limit.trim_count
for _ in range(50):
    tensor = torch.ones(2 << 18)  # 2 MiB
    del tensor
    limit.check()
print(limit.trim_count - trims)
"""

AT_THE_END = """
before = resident()
tensor = torch.ones(100 << 18)  # the last block of the heap
most = resident() - before
del tensor
later()
print(most, resident() - before)
tensor = torch.ones(100 << 18)
assert (tensor == 1).all()
"""

STEPS = """
from contextlib import nullcontext
from trocar_server.spool import Spool

def step(context):
    x = torch.linspace(-2, 2, 1 << 20, requires_grad=True)  # 4 MiB, saved by every operation
    with context:
        y = x
        for _ in range(16):
            y = (y * 1.1).tanh()
        loss = y.sum()
    del y
    loss.backward()
    return x.grad

expected = step(nullcontext())
later()
before, trims = resident(), limit.trim_count
spool = Spool(sys.argv[1], "8MiB", ahead_bytes="8MiB")
for _ in range(3):
    assert torch.equal(step(spool), expected)
trims = limit.trim_count - trims
later()
print(spool.report().written_bytes >> 20, resident() - before, trims)
"""

FORKED = """
import os
child = os.fork()
if child == 0:
    tensors = [torch.ones(4 << 18) for _ in range(50)]
    rows = [torch.ones(1 << 18) for _ in range(50)]
    trims = limit.trim_count
    tensors.clear()
    later()
    os._exit(limit.trim_count - trims)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def figures(processes: Processes, folder: Path, script: str) -> list[int]:
    """Run a script in a process with a limit of 16 MiB; returns the numbers that it prints."""
    ended = processes.run(RESIDENT + script, folder)
    assert ended.errors == ""
    if not ended.output:
        pytest.skip("the C library is not glibc")
    return [int(number) for number in ended.output.split()]


def test_what_is_freed_between_blocks_goes_back(processes: Processes, tmp_path: Path) -> None:
    most, left, trim_count = figures(processes, tmp_path, SCATTERED)
    assert most >= 250
    assert left <= 50 + 16
    assert trim_count == 1


def test_what_this_step_or_the_last_needed_is_kept(processes: Processes, tmp_path: Path) -> None:
    most, left, trim_count = figures(processes, tmp_path, SCATTERED.replace("later()", "limit.check()"))
    assert left >= most - 16
    assert trim_count == 0


def test_what_is_freed_at_the_end_of_the_heap_goes_back(processes: Processes, tmp_path: Path) -> None:
    most, left = figures(processes, tmp_path, AT_THE_END)
    assert most >= 100
    assert left <= 16


def test_within_the_limit_nothing_is_returned(processes: Processes, tmp_path: Path) -> None:
    assert figures(processes, tmp_path, WITHIN) == [0]


def test_a_spool_looks_after_the_limit_and_gradients_stay_equal(processes: Processes, tmp_path: Path) -> None:
    written, left, trim_count = figures(processes, tmp_path, STEPS)
    assert written >= 3 * 40
    assert left <= 16
    assert trim_count > 0


def test_a_forked_process_counts_its_own_memory(processes: Processes, tmp_path: Path) -> None:
    assert figures(processes, tmp_path, FORKED) == [1]


class Fragmented:
    """A heap that uses nothing again: what is freed stays, until it is trimmed."""

    def __init__(self) -> None:
        self.used = self.resident = self.most = 100
        self.trim_count = 0

    def kept_bytes(self, resident: int) -> int:
        return resident - self.used

    def trim(self) -> None:
        self.resident = self.used
        self.trim_count += 1

    def step(self, limit: FreedMemory, growths: list[int]) -> None:
        """Take a step, which takes and frees so many bytes after each check."""
        limit.begin_step()
        self.most, self.trim_count = self.resident, 0
        for growth in growths:
            limit.check()
            self.resident += growth
            self.most = max(self.most, self.resident)


def test_it_is_trimmed_before_what_would_be_the_peak_and_not_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heap = Fragmented()
    monkeypatch.setattr(freed_memory, "resident_bytes", lambda: heap.resident)
    limit = FreedMemory(cast("Any", heap), 5)
    peaks, trims = [], []
    for _ in range(6):
        heap.step(limit, [20, 20, 20, 20, 200, 20, 20])
        peaks.append(heap.most)
        trims.append(heap.trim_count)
    assert peaks[0] > 300
    assert peaks[2:] == [300] * 4  # what is in use, and the largest operation: no trim can do better
    assert max(trims[3:]) <= 2


def test_a_context_that_is_entered_once_for_all_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "resident_bytes", lambda: 100)
    monkeypatch.setattr(freed_memory, "_MOST_CHECKS", 5)
    limit = FreedMemory(cast("Any", Fragmented()), 5)
    for _ in range(100):
        limit.check()
    assert max(len(step.growths) for step in (*limit._steps, limit._step)) == 5


@pytest.mark.parametrize("growths", [[10], [10, 300, 10, 10], []])
def test_a_step_unlike_those_before_does_no_harm(growths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Fragmented()
    monkeypatch.setattr(freed_memory, "resident_bytes", lambda: heap.resident)
    limit = FreedMemory(cast("Any", heap), 5)
    peaks = []
    for step in ([50, 100, 50], [50, 100, 50], growths, [50, 100, 50]):
        heap.step(limit, step)
        peaks.append(heap.most)
    limit.check()
    assert max(peaks) <= 100 + sum(growths) + 200


def test_tcmalloc_is_trimmed_where_it_is_preloaded() -> None:
    library = find_library("tcmalloc_minimal")
    if library is None:
        pytest.skip("tcmalloc is not installed: apt install libtcmalloc-minimal4")
    command = [sys.executable, "-c", RESIDENT + SCATTERED]
    environment = {**os.environ, "LD_PRELOAD": library}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    most, left, trim_count = map(int, ended.stdout.split())
    assert most >= 250
    assert left <= 50 + 16
    assert trim_count == 1


def test_where_the_library_is_another_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str | None) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert limit_freed_memory() is False
    monkeypatch.setattr(sys, "platform", "darwin")
    assert limit_freed_memory() is False
    assert freed_memory.freed_memory() is None


def test_where_another_allocator_is_preloaded_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = iter((1, 2))
    monkeypatch.setattr(heaps, "_address", lambda _: next(addresses))
    assert limit_freed_memory() is False
    assert freed_memory.freed_memory() is None


@pytest.mark.parametrize("size", [-1, "64 apples"])
def test_what_is_no_size_is_refused(size: int | str) -> None:
    with pytest.raises(ValueError, match="most_bytes"):
        limit_freed_memory(size)
