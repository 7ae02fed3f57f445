"""Which functions of Trocar each test reaches, recorded while a whole run goes on.

    make test-all RECORD=1       # writes tests/reached.json, from which `make test-changed` chooses

coverage.py traces the lines of the process of the tests, servers in its threads included; what runs in
processes of its own is not seen. It makes a run half as long again, so CI does without. A run of some tests
(`PYTEST_ARGS="-k name"`) replaces their rows and keeps the others.
"""

from __future__ import annotations

import ast
import json
import time
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import coverage
import pytest

from tests.support import ROOT
from tests.support.selection.sampling import SAMPLE, function_of
from tests.support.selection.spans import spans_of
from tests.support.selection.test_map import Row, Test

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

Reached = dict[str, dict[str, Any]]
"""By test: `seconds`, `cases` (of its parameters), `collected` (all of them, whether they are chosen or not),
`is_whole` (none that ran failed or was skipped), and `functions`, as `service/a.py::Class.method`."""

_SOURCES = [f"{ROOT}/{folder}/*" for folder in ("service", "client", "proto", "tools", "benchmarks")]


@cache
def _bodies(file: str) -> dict[int, str]:
    """Return the function of each line of a file: of its body, which runs when it is called."""
    source = (ROOT / file).read_text(encoding="utf-8")
    lines = dict[int, str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines.update(dict.fromkeys(range(node.body[0].lineno, (node.end_lineno or 0) + 1), ""))
    for name, first, last in spans_of(source):
        lines.update({line: name for line in range(first, last + 1) if line in lines})
    return lines


class Recorder:
    """Plugin of pytest that records what each test of this process reaches."""

    def __init__(self, *, is_choice: bool = False) -> None:
        self.reached: Reached = {}
        self._test = ""
        self._is_choice = is_choice
        self._collected: Counter[str] = Counter()
        self._coverage = coverage.Coverage(data_file=None, config_file=False, include=_SOURCES)
        self._coverage.set_option("run:disable_warnings", ["no-data-collected"])
        self._coverage.start()

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Count the parameters of a test's function, before a run chooses among them."""
        self._collected[function_of(item)] += 1

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record one test; the parameters of a function are one."""
        if (test := function_of(item)) != self._test:
            self._take()
            self._test = test
        begin = time.perf_counter()
        done = yield  # an interrupted test is none that ran
        entry = self._entry()
        entry["seconds"] += time.perf_counter() - begin
        entry["cases"] += 1
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that does not reach what it would: it failed or was skipped."""
        if report.failed or (report.skipped and not hasattr(report, "wasxfail")):
            self._entry()["is_whole"] = False

    def _entry(self) -> dict[str, Any]:
        new = {
            "seconds": 0.0, "cases": 0, "collected": self._collected[self._test],
            "is_whole": not self._is_choice, "functions": set(),
        }  # fmt: skip
        return self.reached.setdefault(self._test, new)

    def _take(self) -> None:
        """Move what was traced since the last test to that test."""
        data = self._coverage.get_data()
        if self._test:
            names: set[str] = self._entry()["functions"]
            for path in data.measured_files():
                file = path.removeprefix(f"{ROOT}/")
                bodies = _bodies(file)
                reached = {bodies.get(line, "") for line in data.lines(path) or ()}
                names.update(f"{file}::{name}" for name in reached if name)
        data.erase()

    def close(self) -> Reached:
        """Stop recording; return what was recorded."""
        self._take()
        self._coverage.stop()
        return self.reached


def write_part(folder: Path, name: str, reached: Reached) -> None:
    """Write what one worker recorded."""
    rows = {test: {**entry, "functions": sorted(entry["functions"])} for test, entry in reached.items()}
    (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")


def read_parts(folder: Path) -> Iterator[Row]:
    """Yield each test that was recorded, with what it reached in all workers of a run."""
    entries: Reached = {}
    for part in sorted(folder.glob("*.json")):
        for test, entry in json.loads(part.read_text(encoding="utf-8")).items():
            known = entries.setdefault(test, {**entry, "seconds": 0.0, "cases": 0, "functions": []})
            known["seconds"] += entry["seconds"]
            known["cases"] += entry["cases"]
            known["is_whole"] &= entry["is_whole"]
            known["functions"] += entry["functions"]
    for name, entry in entries.items():
        sample = min(SAMPLE, max(entry["cases"], entry["collected"]))
        seconds = entry["seconds"] / max(1, entry["cases"]) * sample
        functions = frozenset(entry["functions"])
        is_whole = entry["is_whole"] and entry["cases"] == entry["collected"]
        yield Row(Test(name, round(seconds, 2), len(functions)), functions, is_whole)
