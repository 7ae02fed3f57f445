"""Mutants: small random defects in the server, and how many of them the unit tests of their file notice.

    .venv/bin/python -m tools.mutants --count 40 --seed 0 --commit HEAD~20 --commit HEAD

Each commit is tested in a worktree of its own in a temporary folder: the checkout is never touched. The tests
of a mutant are those at the same path below tests/unit, or of the nearest folder there. Prints JSON.
"""

import argparse
import ast
import copy
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCES = Path("service/trocar_server")
PACKAGES = ("engine", "surgery", "training", "spool")
LIMIT_S = 300
"""A mutant whose tests take longer has been noticed: it hangs."""

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
        case ast.Return(value=value) if value is not None:
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
    found = [(name, node, new) for node in ast.walk(tree) for name, new in mutations(node)]
    if not found:
        return None
    name, node, new = chance.choice(found)
    mutated = ast.fix_missing_locations(Replacing(node, new).visit(tree))
    return name, int(getattr(node, "lineno", 0)), ast.unparse(mutated)


def tests_of(tree: Path, file: Path) -> Path:
    """Return the tests that belong to a source file, or those of the nearest folder that has some."""
    place = Path("tests/unit") / file.relative_to(SOURCES)
    named = place.with_name(f"test_{place.name}")
    if (tree / named).exists():
        return named
    return next(folder for folder in place.parents if (tree / folder).is_dir())


def are_killing(tree: Path, tests: Path) -> bool:
    """Run tests in a worktree; return whether any of them fails."""
    paths = [str(tree / part) for part in ("proto", "service", "client")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0", str(tests)]
    try:
        ended = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return ended.returncode != 0


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


def survivors(commit: str, count: int, seed: int) -> dict[str, Any]:
    """Try so many mutants of a commit; return those that no test notices."""
    chance, tried, alive = random.Random(seed), 0, []
    with worktree(commit) as tree:
        files = sorted(path for name in PACKAGES for path in (tree / SOURCES / name).rglob("*.py"))
        while tried < count:
            path = chance.choice(files)
            source = path.read_text(encoding="utf-8")
            if (mutant := mutate(source, chance)) is None:
                continue
            tried += 1
            name, line, mutated = mutant
            file = path.relative_to(tree)
            path.write_text(mutated, encoding="utf-8")
            tests = tests_of(tree, file)
            if not are_killing(tree, tests):
                alive.append({"file": str(file), "line": line, "mutation": name, "tests": str(tests)})
            path.write_text(source, encoding="utf-8")
    return {"commit": commit, "mutants": tried, "survivors": alive}


def main() -> None:
    """Print the survivors of each commit as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--commit", action="append", help="may be given several times; HEAD without it")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the worktrees are removed
    found = [survivors(commit, given.count, given.seed) for commit in given.commit or ["HEAD"]]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
