"""Saved-tensor hooks around the calls of given modules, in any calling thread.

Hooks of saved tensors belong to a thread, hooks of modules do not. So a module that is wrapped brings its
own: they are set when it is called and taken away behind its forward pass, also when that fails. Of nested
ones the innermost counts.

# Note: [Wrapped modules inside a checkpoint]
`torch.utils.checkpoint` saves nothing of a part that it computes again. The second forward is in the backward
pass, where the wrapping is gone: it would save more tensors than the first one, and autograd would get the
wrong ones (torch 2.14; refused only where their shapes differ). So a module inside brings no hooks.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeAlias

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

_Stack: TypeAlias = list[tuple[nn.Module, AbstractContextManager[Any]]]


class Wrapped(AbstractContextManager["Wrapped"]):
    """Modules whose calls save their tensors through a pair of hooks, until it is removed.

        with Wrapped(model.layers, lambda: saved_tensors_hooks(pack, unpack)):
            loss = model(x).sum()

    An interrupt of the process (KeyboardInterrupt) in the middle of a call leaves the hooks of that call in
    the thread: torch calls hooks of modules behind exceptions, not behind interrupts (2.14).

    Args:
        modules: Each once or several times; what they contain is covered, except checkpointed parts.
        hooks: Gives the hooks for one call, in whichever thread it is.
    """

    def __init__(self, modules: Iterable[nn.Module], hooks: Callable[[], saved_tensors_hooks]) -> None:
        self._hooks = hooks
        self._calls = threading.local()
        self._handles = []
        for module in dict.fromkeys(modules):
            self._handles.append(module.register_forward_pre_hook(self._before))
            # First among the hooks behind the module, so that what the others do is not covered.
            after = module.register_forward_hook(self._after, prepend=True, always_call=True)
            self._handles.append(after)

    def remove(self) -> None:
        """Let the modules be as before. What was saved stays."""
        while self._handles:
            self._handles.pop().remove()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def _before(self, module: nn.Module, _: Any) -> None:
        hooks = nullcontext() if _is_recomputed() else self._hooks()
        stack: _Stack = self._calls.__dict__.setdefault("stack", [])
        hooks.__enter__()
        stack.append((module, hooks))

    def _after(self, module: nn.Module, *_: Any) -> None:
        stack: _Stack = self._calls.__dict__.get("stack", [])
        if stack and stack[-1][0] is module:  # not where the call failed before `_before`
            stack.pop()[1].__exit__(None, None, None)


def _is_recomputed() -> bool:
    """Whether a checkpoint receives what is saved here. See Note: [Wrapped modules inside a checkpoint]."""
    autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 - no stub has it
    hooks = autograd._top_saved_tensors_default_hooks(True)  # None for none
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__
