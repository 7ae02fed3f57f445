"""Mutants: small random defects, and which of them the tests that reach their function notice.

    .venv/bin/python -m tools.mutants --count 40 --seed 0 --commit HEAD~20 --commit HEAD

Each commit is tested in a worktree of its own in a temporary folder: the checkout is never touched. The tests
of a mutant are what `make test-changed` would run for its line, `--seconds` of them. Prints a JSON object a
line: each mutant with the test that noticed it (null for none), then the counts.
"""

import argparse
import ast
import copy
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pydantic_settings  # noqa: F401 - imported once, before the forks: see `killer`
import pytest
import torchvision  # noqa: F401

from tests.support.selection import test_map
from tests.support.selection.sampling import SAMPLE
from tools.changed_tests import Change, choices, chosen, functions_at

ROOT = Path(__file__).parents[1]
_SERVER = "service/trocar_server"
PACKAGES = (f"{_SERVER}/engine", f"{_SERVER}/surgery", f"{_SERVER}/training", "client/trocar")
FAILED = tuple(
    code.value
    for code in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR)
)
"""Exit codes of a failed test, of a file that cannot be imported, and of a conftest that cannot."""
LIMIT_CPU_S, LIMIT_S = 180, 1800
"""A mutant whose tests take longer has been noticed: it hangs. On a busy machine only the first says so; the
second, `--limit`, ends one that waits."""

OPTIONS = (
    "--sample",
    str(SAMPLE),
    "--sample-seed",
    "0",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
)

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


def mutations(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what a node can become, with the mutation's name."""
    changed: Any = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[op]) if type(op) in FLIPPED:
            changed.ops = [FLIPPED[type(op)]()]
            yield "comparison", changed
        case ast.Constant(value=value) if type(value) is int:
            changed.value = value + 1
            yield "constant", changed
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            changed.test = ast.UnaryOp(ast.Not(), test)
            yield "condition", changed
        case ast.Return(value=value) if value is not None and ast.unparse(value) != "None":
            changed.value = ast.Constant(None)
            yield "return", changed


class Replacing(ast.NodeTransformer):
    """Replaces one node of a tree by another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        """Return the replacement, or the node with its children visited."""
        return self._new if node is self._old else self.generic_visit(node)


def mutate(source: str, chance: random.Random) -> tuple[str, int, str] | None:
    """Return a mutation's name, its line and the new source; None where nothing can be mutated."""
    tree = ast.parse(source)
    result = [(name, node, new) for node in ast.walk(tree) for name, new in mutations(node)]
    if not result:
        return None
    name, node, new = chance.choice(result)
    mutated = ast.fix_missing_locations(Replacing(node, new).visit(tree))
    return name, int(getattr(node, "lineno", 0)), ast.unparse(mutated)


class FirstFailure:
    """Plugin of pytest: the first test that failed, or the file that could not be collected."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failed test."""
        if report.failed:
            self.name = self.name or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be imported."""
        if report.failed:
            self.name = self.name or report.nodeid


def killer(tree: Path, tests: Sequence[str], limit_s: float = LIMIT_S) -> str | None:
    """Run tests in a worktree; return the one that fails, or the signal that ended them; None if none does.

    Raises:
        RuntimeError: No test ran, so nothing is known.
    """
    reader, writer = os.pipe()
    child = os.fork()  # torch is imported before: that costs more than most tests
    if child == 0:
        os.close(reader)
        _run(tree, [*OPTIONS, "-o", f"timeout={limit_s}", *tests], writer)
    os.close(writer)
    if not select.select([reader], [], [], limit_s)[0]:
        os.killpg(child, signal.SIGKILL)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        code, _, name = pipe.read().partition(" ")
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    if code not in map(str, (pytest.ExitCode.OK.value, *FAILED)):
        raise RuntimeError(f"pytest ended with '{code}' for {tests}")
    return None if code == "0" else name or "pytest"


def _run(tree: Path, words: Sequence[str], writer: int) -> NoReturn:
    """Run pytest with these words in a forked process, and write its exit code and the first failed test."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_S, LIMIT_CPU_S))
    os.chdir(tree)
    paths = [str(tree / part) for part in ("proto", "service", "client")]
    os.environ.update(PYTHONPATH=os.pathsep.join(paths), PYTHONDONTWRITEBYTECODE="1")
    sys.path[:0] = [str(tree), *paths]
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tools", "tests")]:
        del sys.modules[name]
    log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    first = FirstFailure()
    try:
        code = pytest.main(["-q", "-x", *words], plugins=[first])
        os.write(writer, f"{int(code)} {first.name}".encode())
    except BaseException as error:  # noqa: BLE001 - `killer` raises it
        os.write(writer, repr(error).encode())
    finally:
        os._exit(0)


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Check a commit out into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "worktree", "add", "--detach", "-q", tree, commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def tried(
    commit: str, count: int, seed: int, packages: Sequence[str], seconds: float, limit_s: float
) -> Iterator[dict[str, Any]]:
    """Try so many mutants of a commit; yield each, with the test that noticed it."""
    chance, done = random.Random(seed), 0
    with worktree(commit) as tree:
        known = test_map.read(tree / test_map.FILE.relative_to(ROOT))
        files = sorted(path for name in packages for path in (tree / name).rglob("*.py"))
        while done < count:
            path = chance.choice(files)
            source = path.read_text(encoding="utf-8")
            if (mutant := mutate(source, chance)) is None:
                continue
            done += 1
            name, line, mutated = mutant
            file = path.relative_to(tree)
            functions = functions_at(source, str(file), {line})
            tests = chosen(choices(Change(functions), known), seconds)
            path.write_text(mutated, encoding="utf-8")
            try:
                killed_by = killer(tree, tests, limit_s)
            finally:
                path.write_text(source, encoding="utf-8")
            again = [killed_by] if killed_by and "::" in killed_by else tests
            if killed_by is not None and killer(tree, again, limit_s) is not None:
                killed_by = f"{killed_by}, which fails without the mutation, too"
            shown = source.splitlines()[line - 1].strip() if line else ""
            yield {
                "file": str(file), "line": line, "mutation": name, "source": shown,
                "killed_by": killed_by, "tests": tests,
            }  # fmt: skip


def main() -> None:
    """Print each mutant as it is tried, and the counts at the end."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--commit", action="append", help="may be given several times; HEAD without it")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--package", action="append", help=f"a folder; without it {', '.join(PACKAGES)}")
    parser.add_argument("--seconds", type=float, default=60, help="of tests for each mutant")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds until a mutant hangs")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the worktrees are removed
    for commit in given.commit or ["HEAD"]:
        alive = 0
        packages = given.package or PACKAGES
        for mutant in tried(commit, given.count, given.seed, packages, given.seconds, given.limit):
            alive += mutant["killed_by"] is None
            print(json.dumps(mutant), flush=True)
        print(json.dumps({"commit": commit, "mutants": given.count, "survivors": alive}), flush=True)


if __name__ == "__main__":
    main()
