"""First lines of docstrings and messages are in plain words, and locals say what they hold.

    .venv/bin/python -m pytest tests/unit/test_language.py

What is refused has a plain word: "those of" (the noun again, or a genitive), "there is none" ("or None"),
"for ever" ("until it is stopped"), "what came" ("the results"), and `found` for a local variable.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support import ROOT

_REFUSED = re.compile(
    r"\bthose of\b|\bthere (?:is|are) none\b|\bfor ever\b|\bwhat (?:\w+ )?came\b", re.IGNORECASE
)
_NAMES = frozenset({"found"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources() -> list[Path]:
    """Return our modules, without generated ones."""
    paths = [path for folder in ("client", "service", "tools") for path in (ROOT / folder).rglob("*.py")]
    return [path for path in paths if "_sync" not in path.parts and "node_modules" not in path.parts]


def refused_texts(tree: ast.AST) -> Iterator[str]:
    """Yield first paragraphs of docstrings, and texts of errors, that say a refused phrase."""
    for node in ast.walk(tree):
        texts: list[object]
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)):
            texts = [(ast.get_docstring(node) or "").partition("\n\n")[0]]
        elif isinstance(node, ast.Raise) and node.exc is not None:
            texts = [part.value for part in ast.walk(node.exc) if isinstance(part, ast.Constant)]
        else:
            continue
        for text in texts:
            if isinstance(text, str) and _REFUSED.search(" ".join(text.split())):
                yield text


def refused_locals(tree: ast.AST) -> Iterator[str]:
    """Yield functions with a local variable of a refused name."""
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            assigned = {
                part.id
                for part in ast.walk(node)
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            }
            if _NAMES.intersection(assigned):
                yield node.name


def all_of(check: Callable[[ast.AST], Iterator[str]]) -> list[str]:
    """Return what a check finds, with the modules."""
    paths = sources()
    assert len(paths) > 500
    return [
        f"{path.relative_to(ROOT)}: {one}"
        for path in paths
        for one in check(ast.parse(path.read_text(encoding="utf-8")))
    ]


def test_first_lines_and_messages_are_in_plain_words() -> None:
    assert all_of(refused_texts) == []


def test_locals_say_what_they_hold() -> None:
    assert all_of(refused_locals) == []


def test_the_checks_find_what_is_refused() -> None:
    code = '''
def one():
    """Return the tensors, those of edits last.

    There is none.
    """
    found = 1
    raise ValueError(f"{found} for  ever")
'''
    tree = ast.parse(code)
    assert list(refused_texts(tree)) == ["Return the tensors, those of edits last.", " for  ever"]
    assert list(refused_locals(tree)) == ["one"]
