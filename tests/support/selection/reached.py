"""Which functions of Trocar each test reaches, recorded while a whole run goes on.

    make test-all                # keeps tests/reached.json, from which `make test-changed` chooses

A profiler of the standard library (cProfile's, in C) counts calls on the thread of the tests and on every
thread that starts during them, servers' included; what runs in processes of their own is not seen. Tracing
lines, as coverage.py does, takes half as long again as the tests; this takes a tenth.
"""

from __future__ import annotations

import cProfile
import gc
import json
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import ROOT
from tests.support.selection.sampling import SAMPLE, function_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

Reached = dict[str, dict[str, Any]]
"""By test: `seconds`, `cases` (of its parameters), and `functions`, as `service/a.py::Class.method`."""

_PREFIX = f"{ROOT}/"
_SUITE = (f"{ROOT}/tests/", f"{ROOT}/.venv")


def supported() -> bool:
    """Whether this Python counts the calls of each thread apart: from 3.12 on, a process has one profiler."""
    return sys.version_info < (3, 12)


def name_of(file: str, qualname: str) -> str:
    """Return a function's name in the map: functions inside of it count as itself."""
    return f"{file}::{qualname.partition('.<locals>')[0]}"


class Recorder:
    """Plugin of pytest that records what each test of this process reaches."""

    def __init__(self) -> None:
        self.reached: Reached = {}
        self._profilers: dict[threading.Thread, cProfile.Profile] = {}
        self._own = self._new()
        self._test = ""
        threading.setprofile(self._on_thread)

    def _new(self) -> cProfile.Profile:
        profiler = cProfile.Profile(subcalls=False, builtins=False)
        self._profilers[threading.current_thread()] = profiler
        return profiler

    def _on_thread(self, *_: Any) -> None:
        """Count the calls of a thread that starts, in place of this function, which saw its first one."""
        self._new().enable()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record one test; the parameters of a function are one."""
        if (test := function_of(item)) != self._test:
            self._take()
            self._test = test
        self._own.enable()  # a test may have put a profiler of its own in place
        begin = time.perf_counter()
        try:
            return (yield)
        finally:
            entry = self._entry()
            entry["seconds"] += time.perf_counter() - begin
            entry["cases"] += 1

    def _entry(self) -> dict[str, Any]:
        return self.reached.setdefault(self._test, {"seconds": 0.0, "cases": 0, "functions": set()})

    def _take(self) -> None:
        """Move what was counted since the last test to that test."""
        names: set[str] = set() if not self._test else self._entry()["functions"]
        gc.disable()  # a finaliser could let a thread go on while its profiler is read
        try:
            for thread, profiler in list(self._profilers.items()):
                names.update(_names(profiler))
                profiler.clear()
                if not thread.is_alive():
                    del self._profilers[thread]
        finally:
            gc.enable()

    def close(self) -> Reached:
        """Stop recording; return what was recorded."""
        self._take()
        threading.setprofile(None)
        self._own.disable()
        return self.reached


def _names(profiler: cProfile.Profile) -> Iterator[str]:
    """Yield the functions of Trocar that a profiler has seen."""
    for entry in profiler.getstats():
        if isinstance(entry.code, str):
            continue
        file, qualname = entry.code.co_filename, entry.code.co_qualname
        if file.startswith(_PREFIX) and not file.startswith(_SUITE) and not qualname.startswith("<"):
            yield name_of(file.removeprefix(_PREFIX), qualname)


def write_part(folder: Path, name: str, reached: Reached) -> None:
    """Write what one worker recorded."""
    rows = {test: {**entry, "functions": sorted(entry["functions"])} for test, entry in reached.items()}
    (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")


def read_parts(folder: Path) -> Iterator[tuple[str, float, set[str]]]:
    """Yield each test that was recorded: its name, the seconds of a sample of it, its functions."""
    for part in sorted(folder.glob("*.json")):
        for test, entry in json.loads(part.read_text(encoding="utf-8")).items():
            yield (
                test,
                entry["seconds"] / max(1, entry["cases"]) * min(entry["cases"], SAMPLE),
                set(entry["functions"]),
            )
