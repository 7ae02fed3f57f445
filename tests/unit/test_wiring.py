"""Objects get their callbacks when they are built: nobody assigns one to another object afterwards."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLBACK = re.compile(r"_*(on|check|poke|notify)_\w+|\w+_(callback|listener|hook)")
OTHERS = {
    "service/trocar_server/spool/blocks/traffic.py": "its threads begin with the first write, not before",
}


def callbacks_of(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes of other objects that are assigned like callbacks: by name, or as a lambda."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            for one in target.elts if isinstance(target, ast.Tuple) else (target,):
                is_own = isinstance(one, ast.Attribute) and getattr(one.value, "id", "") == "self"
                if not isinstance(one, ast.Attribute) or is_own:
                    continue
                if CALLBACK.fullmatch(one.attr) or isinstance(node.value, ast.Lambda):
                    yield one.attr


def test_no_callback_is_assigned_to_another_object() -> None:
    seen = {}
    for path in sorted((ROOT / "service" / "trocar_server").rglob("*.py")):
        names = list(callbacks_of(ast.parse(path.read_text(encoding="utf-8"))))
        names = [name for name in names if name != "check_hostname"]  # of `ssl`, a switch
        if names:
            seen[path.relative_to(ROOT).as_posix()] = names
    assert {path: names for path, names in seen.items() if path not in OTHERS} == {}
    assert OTHERS.keys() - seen.keys() == set()


@pytest.mark.parametrize(
    ("program", "names"),
    [
        ("trainers.on_close, trainers.on_moved = fits.forget, fits.let_go", ["on_close", "on_moved"]),
        ("x.limit = lambda: 3", ["limit"]),
        ("self.on_close = on_close; self._on_drop = on_drop; x.only = 3", []),
    ],
)
def test_callbacks_are_seen(program: str, names: list[str]) -> None:
    assert list(callbacks_of(ast.parse(program))) == names
