"""Hooks of a pass: registered by a session, all or none, and removed at its end.

A session is a context manager. `hook_calls` observes every call of a module, and replaces inputs or outputs:

    with ExitStack() as handles:
        hook_calls(module, handles, enter=..., leave=...)
        model(batch)
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, ClassVar, Self, TypeAlias

from torch import nn

from trocar_server.surgery.ports import Arguments
from trocar_server.surgery.sessions.recomputation import is_recomputing

Enter: TypeAlias = Callable[[int, tuple[Any, ...], dict[str, Any]], Arguments | None]
"""Takes the call's index and its inputs; returns replacement inputs, or None."""

Leave: TypeAlias = Callable[[int, Any], Any]
"""Takes the call's index and its output; returns a replacement output, or None."""

Again: TypeAlias = Callable[[int], int]
"""Takes the number of calls of the first forward; returns the index of a call that is recomputed."""

_CAPTURING = ("transformers.utils.output_capturing", "timm.models._hook")
"""Libraries whose models collect values for their own output with forward hooks, which only read."""


class Session(ABC):
    """Base class of the sessions of a pass.

        class Counting(Session):
            def _open(self) -> None:
                self._handles.callback(module.register_forward_hook(count).remove)

    Not thread-safe: hooks are state of the module, so the caller holds the replica's lease for as long as
    the session is open.
    """

    _ends_with: ClassVar[tuple[type[BaseException], ...]] = ()
    """Errors that end the context without an error."""

    _handles: ExitStack
    """Removals of the hooks; its own of each time that the context is entered."""

    @abstractmethod
    def _open(self) -> None:
        """Register the hooks; each with its removal in `_handles`."""

    def __enter__(self) -> Self:
        self._handles = ExitStack()
        try:
            self._open()
        except BaseException:
            self._handles.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._handles.close()
        return isinstance(error, self._ends_with)


def hook_calls(
    module: nn.Module,
    handles: ExitStack,
    enter: Enter | None,
    leave: Leave,
    again: Again | None = None,
) -> None:
    """Call back for every call of a module, counted from 0, until `handles` is closed.

    Calls of a recomputation are counted on, as further calls, unless `again` gives their index: see
    Note: [Recomputation and hooks].
    """
    count = 0
    open_calls: list[tuple[int, BaseException | None]] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        nonlocal count
        if again is not None and is_recomputing():
            index = again(count)
        else:
            index, count = count, count + 1
        open_calls.append((index, sys.exc_info()[1]))
        return None if enter is None else enter(index, args, kwargs)

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not open_calls:  # a hook that runs before ours has raised on the way in
            return None
        index, handled = open_calls.pop()
        # Another error than before the call is the module's own, or that of an earlier hook: torch (2.14)
        # then runs this one with the raw output. Returning a value, or ending the pass, would hide the error.
        has_failed = sys.exc_info()[1] is not handled or (output is None and handled is not None)
        return None if has_failed else leave(index, output)

    handles.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    # Runs after an error too, so that a call whose error the model catches is closed.
    handles.callback(module.register_forward_hook(after, always_call=True).remove)
    if len(module._forward_hooks) > 1:
        _capture_last(module)


# Note: [A model's own captured states]
# transformers 5 collects `hidden_states` and `attentions` with forward hooks, which it installs in the first
# pass that wants them, and for good. Hooks run in the order in which they are registered: an edit would be in
# the captured states in that first pass, and in no later one. So those hooks run after ours. Other hooks of
# a model keep their place before ours: they may change the output, and a tap sees what they return.
def _capture_last(module: nn.Module) -> None:
    """Move the hooks with which a model captures its own states behind all others."""
    for key, hook in list(module._forward_hooks.items()):
        function = getattr(hook, "func", hook)  # timm's are partials of methods
        if getattr(function, "__module__", None) in _CAPTURING:
            module._forward_hooks.move_to_end(key)  # type: ignore[attr-defined]  # an OrderedDict (torch 2.14)
