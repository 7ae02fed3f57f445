"""Seeing every call of a module, and replacing what it takes or returns.

with ExitStack() as handles:
    hook_calls(module, handles, enter=..., leave=...)
    model(batch)
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, TypeAlias

from torch import nn

from trocar_server.surgery.recording import has_raised

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword inputs of a call."""

Enter: TypeAlias = Callable[[int, tuple[Any, ...], dict[str, Any]], Arguments | None]
"""Gets the call's index and what it takes; what it returns, the module takes instead."""

Leave: TypeAlias = Callable[[int, Any], Any]
"""Gets the call's index and what it returned; what it returns takes its place, unless that is None."""


def hook_calls(module: nn.Module, handles: ExitStack, enter: Enter, leave: Leave) -> None:
    """Tell of every call of a module, counted from 0, until `handles` is closed."""
    count = 0
    open_calls: list[int] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        nonlocal count
        open_calls.append(count)
        count += 1
        return enter(open_calls[-1], args, kwargs)

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        index = open_calls.pop()
        return None if has_raised(output) else leave(index, output)

    handles.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    # Called after an error too (with None), so that a call which a model catches is closed.
    handles.callback(module.register_forward_hook(after, always_call=True).remove)


def in_ports(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a call takes, by port."""
    return {"in": args, **{f"in({key})": value for key, value in kwargs.items()}}


def with_ports(ports: Mapping[str, Any]) -> Arguments:
    """Return the arguments that `in_ports` makes these of."""
    keywords = {port[3:-1]: value for port, value in ports.items() if port != "in"}
    return tuple(ports["in"]), keywords
