"""The tests of a change, within a few minutes: `make test-changed`.

    .venv/bin/python -m tools.changed_tests        # what is not committed, or else the last commit
    .venv/bin/python -m tools.changed_tests --base main~5 --list

Takes the functions whose lines differ from `--base`, and of each the tests that reach it, narrowest first, in
turns, until they would take `--seconds`. `tests/reached.json` says which tests reach a function; a file that
is not in it has the tests that import it and those at its path below tests/unit. A test file that differs
runs whole.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.selection import test_map
from tests.support.selection.spans import spans_of
from tests.support.selection.test_map import Test, TestMap
from tools.importing_tests import importing_tests

ROOT = Path(__file__).parents[1]
_HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
_UNKNOWN_SECONDS = 5.0
"""What a test is taken to last that no run has recorded."""

AREAS = {
    "deploy/": ["tests/deploy"],
    "docs/": ["tests/integration/client/test_docs.py", "tests/unit/test_site.py"],
    "notebooks/": ["tests/integration/client/test_notebooks.py"],
    "page/": ["tests/integration/client/test_page_in_browser.py"],
    "proto/": ["tests/contract", "tests/unit/rpc/codec"],
    "pyproject.toml": ["tests/unit/test_dependency_ranges.py"],
}
"""Tests of files that are not Python's."""


@dataclass
class Change:
    """What differs from a commit."""

    functions: list[str] = field(default_factory=list)
    """As in the map; a whole file, `a.py::`, where lines outside of functions differ."""
    files: list[str] = field(default_factory=list)


def git(*words: str) -> str:
    """Return what git says."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def default_base() -> str:
    """Return HEAD, or its parent where everything is committed."""
    return "HEAD" if git("status", "--porcelain").strip() else "HEAD~1"


def change_since(base: str) -> Change:
    """Return what differs from a commit, files that git does not track yet included."""
    new = git("ls-files", "--others", "--exclude-standard").splitlines()
    change = Change(files=[*git("diff", "--name-only", base).splitlines(), *new])
    for file in change.files:
        path = ROOT / file
        if not file.endswith(".py") or file.startswith("tests/") or not path.exists():
            continue
        lines = None if file in new else changed_lines(git("diff", "--unified=0", base, "--", file))
        change.functions += functions_at(path.read_text(encoding="utf-8"), file, lines)
    return change


def changed_lines(diff: str) -> set[int]:
    """Return the lines of the new file that differ; of lines that are gone, the one before."""
    lines = set[int]()
    for match in _HUNK.finditer(diff):
        first, count = int(match[1]), int(match[2] or 1)
        lines.update(range(first, first + max(1, count)))
    return lines


def functions_at(source: str, file: str, lines: set[int] | None) -> list[str]:
    """Return the functions in which lines stand (None: all), the whole file for lines outside of them."""
    spans = spans_of(source)
    if lines is None:
        return [f"{file}::{name}" for name, _, _ in spans] or [f"{file}::"]
    names = dict[str, None]()
    for line in sorted(lines):
        inside = [name for name, first, last in spans if first <= line <= last]
        names.setdefault(f"{file}::{inside[-1] if inside else ''}")
    return list(names)


def choices(change: Change, known: TestMap) -> list[list[Test]]:
    """Return a list of tests for each thing that differs, the best first."""
    lists = []
    for function in change.functions:
        file = function.partition("::")[0]
        if function in known.functions:
            lists.append(known.functions[function])
        else:
            lists += [*known.of_file(file)] or [[_whole(test) for test in importing_tests(ROOT, file)]]
    for file in change.files:
        if file.startswith("tests/") and file.endswith(".py") and (ROOT / file).exists():
            own = [file] if Path(file).name.startswith("test_") else importing_tests(ROOT, file)
            lists.insert(0, [_whole(test) for test in own])
        lists += [
            [_whole(test) for test in tests] for start, tests in AREAS.items() if file.startswith(start)
        ]
    return lists


def _whole(name: str) -> Test:
    return Test(name, _UNKNOWN_SECONDS, 0)


def chosen(lists: Sequence[Sequence[Test]], seconds: float) -> list[str]:
    """Return tests in turns, the first of each list, then the second, until they take so long."""
    taken: dict[str, float] = {}
    for turn in range(max(map(len, lists), default=0)):
        for tests in lists:
            if turn < len(tests) and tests[turn].name not in taken:
                test = tests[turn]
                if sum(taken.values()) + test.seconds <= seconds or not taken:
                    taken[test.name] = test.seconds
    return [name for name in taken if test_map.is_there(name)]  # a map may be older than the tests


def main() -> None:
    """Print the tests, or run them with the arguments behind `--`."""
    parser = argparse.ArgumentParser(prog="python -m tools.changed_tests", description=__doc__)
    parser.add_argument(
        "--base", help="a commit; HEAD without it, or its parent where nothing differs from HEAD"
    )
    parser.add_argument("--seconds", type=float, default=240, help="of tests, in two processes")
    parser.add_argument("--list", action="store_true", help="print them, run nothing")
    parser.add_argument("python", nargs="*", help="how to run them: `-m pytest` and its arguments")
    given = parser.parse_args()
    base = given.base or default_base()
    tests = chosen(choices(change_since(base), test_map.read()), given.seconds)
    if not tests:
        print(f"nothing that tests reach differs from {base}")
    elif given.list:
        print("\n".join(tests))
    else:
        print(f"{len(tests)} tests of what differs from {base}", flush=True)
        os.execv(sys.executable, [sys.executable, *given.python, *tests])


if __name__ == "__main__":
    main()
