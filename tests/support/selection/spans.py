"""Functions of a source and the lines in which they stand."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def spans_of(source: str) -> list[tuple[str, int, int]]:
    """Return each function outside of functions, with its first and last line, decorators included."""
    return list(_spans(ast.parse(source), ""))


def _spans(tree: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield prefix + node.name, first, node.end_lineno or node.lineno
        elif isinstance(node, ast.ClassDef):
            yield from _spans(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _spans(node, prefix)
