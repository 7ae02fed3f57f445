"""The map from functions of Trocar to the tests that reach them: `tests/reached.json`.

For each function it keeps some twenty tests, those first that reach little else: they say most about a change
of it. The file is made by `make test-all RECORD=1`, or in parts, each with some tests, and is checked in, so
that `make test-changed` works in a fresh clone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from tests.support import ROOT
from tests.support.selection.spans import spans_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

FILE = ROOT / "tests" / "reached.json"
KEPT = 20
"""So many tests are kept of each function,"""
KEPT_OF_A_FILE = 4
"""and so many of one test file: others see other defects."""


@dataclass(frozen=True)
class Test:
    """A test's function."""

    __test__ = False
    name: str
    seconds: float
    """How long a sample of its parameters takes."""
    breadth: int
    """How many functions of Trocar it reached."""


@dataclass
class TestMap:
    """Tests by function, the narrowest first."""

    __test__ = False
    functions: dict[str, list[Test]] = field(default_factory=dict)

    def of_file(self, file: str) -> Iterator[list[Test]]:
        """Yield the tests of each function of a file."""
        prefix = f"{file}::"
        return (tests for name, tests in self.functions.items() if name.startswith(prefix))


@dataclass(frozen=True)
class Row:
    """A test's function, with what it reaches."""

    test: Test
    functions: frozenset[str]
    is_whole: bool = True
    """False where a run had a part of its parameters only, or one failed or was skipped."""


def rows_of(known: TestMap) -> dict[str, Row]:
    """Return what a map keeps of each test, by its name."""
    functions: dict[Test, set[str]] = {}
    for function, tests in known.functions.items():
        for test in tests:
            functions.setdefault(test, set()).add(function)
    return {test.name: Row(test, frozenset(names)) for test, names in functions.items()}


def merged(known: TestMap, recorded: Iterable[Row]) -> TestMap:
    """Return a map in which tests that a run recorded have what they reached in it, all others what they had.

    A test of which a part ran, or that failed, also keeps what it had. Tests and functions leave when the
    sources do not have them any more.
    """
    rows = rows_of(known)
    for row in recorded:
        name = row.test.name
        rows[name] = row if row.is_whole or name not in rows else _both(rows[name], row)
    there = (row for row in rows.values() if is_there(row.test.name))
    return joined(Row(row.test, frozenset(filter(_is_function, row.functions))) for row in there)


def _both(one: Row, other: Row) -> Row:
    seconds = max(one.test.seconds, other.test.seconds)
    functions = one.functions | other.functions
    breadth = max(one.test.breadth, other.test.breadth, len(functions))
    return Row(Test(one.test.name, seconds, breadth), functions)


def joined(rows: Iterable[Row]) -> TestMap:
    """Return the map of what tests reach."""
    by_function: dict[str, list[Test]] = {}
    for row in rows:
        for function in row.functions:
            by_function.setdefault(function, []).append(row.test)
    return TestMap({function: _kept(tests) for function, tests in sorted(by_function.items())})


def is_there(test: str) -> bool:
    """Return whether the sources have a test, or a file or folder of tests."""
    file, _, function = test.partition("::")
    path = ROOT / file
    if not function:
        return path.exists()
    return path.is_file() and f"def {function.rpartition('::')[2]}(" in _text(path)


def _is_function(name: str) -> bool:
    file, _, function = name.partition("::")
    return function in _functions(ROOT / file)


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _functions(path: Path) -> frozenset[str]:
    return frozenset(name for name, _, _ in spans_of(_text(path))) if path.is_file() else frozenset()


def _kept(tests: list[Test]) -> list[Test]:
    kept: list[Test] = []
    of_file: dict[str, int] = {}
    for test in sorted(tests, key=lambda test: (test.breadth, test.seconds, test.name)):
        file = test.name.partition("::")[0]
        of_file[file] = of_file.get(file, 0) + 1
        if of_file[file] <= KEPT_OF_A_FILE:
            kept.append(test)
    return kept[:KEPT]


def write(known: TestMap, path: Path = FILE) -> None:
    """Write a map: a line for each test and for each function, so that a difference can be read.

    Names stand below those of their files, which halves the map.
    """
    tests = sorted({test for kept in known.functions.values() for test in kept}, key=lambda test: test.name)
    number = {test: index for index, test in enumerate(tests)}
    rows = ((test.name, _dumped([test.seconds, test.breadth])) for test in tests)
    functions = (
        (name, _dumped([number[test] for test in kept])) for name, kept in sorted(known.functions.items())
    )
    text = f'{{"tests": {_by_file(rows)},\n"functions": {_by_file(functions)}}}\n'
    path.write_text(text, encoding="utf-8")


def _by_file(rows: Iterable[tuple[str, str]]) -> str:
    files: dict[str, list[str]] = {}
    for name, value in rows:
        file, _, function = name.partition("::")
        files.setdefault(file, []).append(f"{json.dumps(function)}:{value}")
    return _braced(f"{json.dumps(file)}: {_braced(lines)}" for file, lines in files.items())


def _braced(lines: Iterable[str]) -> str:
    return "{\n" + ",\n".join(lines) + "\n}"


def _dumped(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def read(path: Path = FILE) -> TestMap:
    """Read a map."""
    data = json.loads(path.read_text(encoding="utf-8"))
    tests = [
        Test(f"{file}::{name}", *row) for file, rows in data["tests"].items() for name, row in rows.items()
    ]
    functions = {
        f"{file}::{name}": [tests[index] for index in kept]
        for file, rows in data["functions"].items()
        for name, kept in rows.items()
    }
    return TestMap(functions)
