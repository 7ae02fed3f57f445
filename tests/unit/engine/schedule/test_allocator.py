"""Huge pages for the heap: asked for in a process of its own, by what Linux says of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trocar_server.engine.schedule import allocator

PROGRAM = """
import ctypes
from trocar_server.engine.schedule.allocator import keep_freed_memory, use_huge_pages
asked = keep_freed_memory() and use_huge_pages()
block = bytearray(64 << 20)
flags, inside = "", False
for line in open("/proc/self/smaps"):
    inside = line.rstrip().endswith("[heap]") if "-" in line.split(" ")[0] else inside
    if inside and line.startswith("VmFlags:"):
        flags += line
print(asked, " hg" in flags)
"""


def asked_and_flagged(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.skipif(
    not allocator._may_use_huge_pages(), reason="Linux does not leave huge pages to programs here"
)
def test_the_heap_is_flagged_unless_the_environment_says_no() -> None:
    assert asked_and_flagged(TROCAR_HUGE_PAGES="1") == ["True", "True"]
    assert asked_and_flagged(TROCAR_HUGE_PAGES="0") == ["False", "False"]


@pytest.mark.parametrize(
    ("pages", "overcommit", "expected"),
    [
        ("always [madvise] never", "0", True),
        ("always [madvise] never", "2", False),
        ("[always] madvise never", "0", False),
        ("always madvise [never]", "1", False),
    ],
)
def test_they_are_asked_for_only_where_that_changes_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: str, overcommit: str, expected: bool
) -> None:
    for name, text in (("_HUGE_PAGES", pages), ("_OVERCOMMIT", overcommit)):
        (tmp_path / name).write_text(f"{text}\n")
        monkeypatch.setattr(allocator, name, tmp_path / name)
    assert allocator._may_use_huge_pages() is expected


def test_a_machine_that_tells_nothing_of_huge_pages_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator, "_HUGE_PAGES", tmp_path / "none")
    assert not allocator._may_use_huge_pages()
    assert not allocator.use_huge_pages()
