"""The map from functions of Trocar to the tests that reach them: `tests/reached.json`.

For each function it keeps some twenty tests, those first that reach little else: they say most about a change
of it. The file is made by `make test-all`, and is checked in, so that `make test-changed` works in a fresh
clone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support import ROOT

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


def joined(recorded: Iterable[tuple[str, float, set[str]]]) -> TestMap:
    """Return the map of what was recorded."""
    by_function: dict[str, list[Test]] = {}
    for name, seconds, functions in recorded:
        test = Test(name, round(seconds, 2), len(functions))
        for function in functions:
            by_function.setdefault(function, []).append(test)
    return TestMap({function: _kept(tests) for function, tests in sorted(by_function.items())})


def _kept(tests: list[Test]) -> list[Test]:
    kept: list[Test] = []
    of_file: dict[str, int] = {}
    for test in sorted(tests, key=lambda test: (test.breadth, test.seconds, test.name)):
        file = test.name.partition("::")[0]
        of_file[file] = of_file.get(file, 0) + 1
        if of_file[file] <= KEPT_OF_A_FILE:
            kept.append(test)
    return kept[:KEPT]


def write(found: TestMap, path: Path = FILE) -> None:
    """Write a map: a line for each test and for each function, so that a difference can be read."""
    tests = sorted({test for kept in found.functions.values() for test in kept}, key=lambda test: test.name)
    number = {test: index for index, test in enumerate(tests)}
    names = ",\n".join(json.dumps([test.name, test.seconds, test.breadth]) for test in tests)
    rows = ",\n".join(
        f"{json.dumps(function)}: {json.dumps([number[test] for test in kept], separators=(',', ':'))}"
        for function, kept in found.functions.items()
    )
    path.write_text(f'{{"tests": [\n{names}\n],\n"functions": {{\n{rows}\n}}}}\n', encoding="utf-8")


def read(path: Path = FILE) -> TestMap:
    """Read a map."""
    data = json.loads(path.read_text(encoding="utf-8"))
    tests = [Test(*row) for row in data["tests"]]
    return TestMap(
        {function: [tests[index] for index in kept] for function, kept in data["functions"].items()}
    )
