"""Loops of asynchronous functions whose body can go round without an await that suspends, by their syntax."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

SUSPENDING = frozenset(
    {
        "asyncio.sleep",
        "asyncio.to_thread",
        "asyncio.wait",
        "asyncio.gather",
        "async_pause",
        "loop.sock_accept",
    }
)
"""Functions whose await always lets other tasks run.

`Event.wait`, `Condition.wait_for`, `Queue.get` and stream reads do not: they return at once where what they
wait for is there.
"""

Function: TypeAlias = ast.AsyncFunctionDef | ast.FunctionDef | ast.Lambda


def spinning_loops(path: Path) -> Iterator[str]:
    """Yield the name of each asynchronous function of a file with such a loop."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.AsyncFunctionDef):
            for node in _own(function):
                if isinstance(node, ast.While) and _goes_round(node):
                    yield function.name


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, Function):
            yield child
            yield from _own(child)


def _goes_round(loop: ast.While) -> bool:
    return not _suspends(loop.test) and bool(_ends(loop.body) & {"falls", "continues"})


def _ends(statements: Sequence[ast.stmt]) -> set[str]:
    """Return how statements may end before any await that suspends."""
    found: set[str] = set()
    for statement in statements:
        ends = _ends_of(statement)
        found |= ends - {"falls"}
        if "falls" not in ends:
            return found
    return found | {"falls"}


def _ends_of(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.Continue():
            return {"continues"}
        case ast.If(test=test, body=body, orelse=other) if not _suspends(test):
            return _ends(body) | _ends(other)
        case ast.Try(body=body, handlers=handlers, orelse=other, finalbody=final):
            caught = {end for handler in handlers for end in _ends(handler.body)}
            return _then(_then(_ends(body), other) | caught, final)
        case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
            ends = set() if any(_suspends(item.context_expr) for item in items) else _ends(body)
            return ends | _when_suppressed(items)
        case ast.While(test=test) if not _suspends(test):
            return {"falls"}  # it may not be entered, or left at once
        case ast.For() | ast.AsyncFor() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return {"falls"}  # over nothing; a function does not run here
        case ast.If() | ast.While() | ast.Return() | ast.Raise() | ast.Break():
            return set()
        case _:
            return set() if _suspends(statement) else {"falls"}


def _then(ends: set[str], statements: Sequence[ast.stmt]) -> set[str]:
    return (ends - {"falls"}) | _ends(statements) if "falls" in ends else ends


def _when_suppressed(items: Sequence[ast.withitem]) -> set[str]:
    """Return how a block ends whose errors are suppressed before it awaited."""
    return {"falls"} if any("suppress" in ast.unparse(item.context_expr) for item in items) else set()


def _suspends(node: ast.AST) -> bool:
    """Whether it awaits a function that always suspends."""
    nodes = [node, *_own(node)]
    return any(
        isinstance(each, ast.Await)
        and isinstance(each.value, ast.Call)
        and ast.unparse(each.value.func) in SUSPENDING
        for each in nodes
    )
