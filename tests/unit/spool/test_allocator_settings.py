"""Settings of the C allocator: memory that is freed is no longer the process's."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.spool.spool_processes import Processes
from trocar_server.spool import return_freed_memory
from trocar_server.spool.allocator_settings import ALLOCATOR_ENVIRONMENT

KEPT = """
import os
from pathlib import Path
import torch
from trocar_server.spool import return_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

taken = return_freed_memory()
before = resident()
for _ in range(2):
    large, small = [], []
    for _ in range(50):
        large.append(torch.ones(4 << 18))  # 4 MiB
        small.append(torch.ones(1000))
    most = resident() - before
    large.clear()
print(taken, most, resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own figures")
def test_what_is_freed_goes_back_at_once(processes: Processes, tmp_path: Path) -> None:
    ended = processes.run(KEPT, tmp_path)
    assert ended.errors == ""
    taken, most_mib, kept_mib = ended.output.split()
    if taken == "False":
        pytest.skip("the C library is not glibc")
    assert int(most_mib) >= 200
    assert int(kept_mib) <= 20


def test_where_the_library_is_another_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert return_freed_memory() is False
    monkeypatch.setattr(sys, "platform", "darwin")
    assert return_freed_memory() is False


def test_a_process_starts_with_the_environment() -> None:
    """glibc says on stderr what it does not understand of its tunables, in most versions."""
    command = [sys.executable, "-c", "print(bytes(1 << 22)[0])"]
    ended = subprocess.run(
        command, env=os.environ | ALLOCATOR_ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert (ended.stdout, ended.stderr) == ("0\n", "")
