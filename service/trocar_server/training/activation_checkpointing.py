"""Modules whose values are computed again in the backward pass instead of saved.

# Note: [The second forward]
`torch.utils.checkpoint` (use_reentrant=False) runs a module's forward once more in the backward pass, with
the random numbers of the first time. What the module keeps in buffers would move a second time: batch norm's
statistics, for example, would count the batch twice. So the buffers are put back to what they were before the
first forward, and afterwards to what they are now. The version counters of autograd are left alone, because
the values are the same again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.checkpoint import checkpoint

from trocar_server.training.many import copy_all


@contextmanager
def activation_checkpointing(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let calls of these modules inside the context save their inputs only.

        with activation_checkpointing([model.layer1, model.layer2]):
            loss = criterion(model(x), y)
            loss.backward()

    Gradients, random numbers and buffers are bit-equal to those without it. The backward pass may run behind
    the context. Modules may lie in one another.
    """
    with ExitStack() as undo:
        for module in modules:
            _wrap(module, undo)
        yield


def _wrap(module: nn.Module, undo: ExitStack) -> None:
    forward: Callable[..., Any] = module.forward
    had_own = "forward" in vars(module)

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        contexts = _Buffers(module).contexts
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def unwrap() -> None:
        if had_own:
            module.forward = forward
        else:
            del module.forward

    module.forward = checkpointed
    undo.callback(unwrap)


class _Buffers:
    """The buffers of a module before its first forward. See Note: [The second forward]."""

    def __init__(self, module: nn.Module) -> None:
        is_moving = module.training or any(part.training for part in module.modules())
        self._tensors = list(module.buffers()) if is_moving else []
        self._before = [tensor.detach().clone() for tensor in self._tensors]

    def contexts(self) -> tuple[Any, Any]:
        return _nothing(), self._replayed()

    @contextmanager
    def _replayed(self) -> Iterator[None]:
        now = [tensor.detach().clone() for tensor in self._tensors]
        self._put(self._before)
        try:
            yield
        finally:
            self._put(now)

    def _put(self, values: list[Tensor]) -> None:
        if not self._tensors:
            return
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(self._tensors)):
            copy_all(self._tensors, values)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
