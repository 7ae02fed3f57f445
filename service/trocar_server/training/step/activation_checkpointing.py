"""Activation checkpointing: recomputes modules in the backward pass instead of saving their activations.

These are the modules that a trainer's spec names, and the parts that the model's own code checkpoints.

# Note: [Buffers and recomputation]
`torch.utils.checkpoint` runs a module's forward once more in the backward pass, with the random numbers of
the first time. Buffers would be updated a second time: batch norm's statistics, for example, would count the
batch twice. So the buffers are reset to their values before the first forward, and restored afterwards; where
the module has replaced one by another tensor, the old one is put back meanwhile. Autograd's version counters
are left unchanged, because the values are the same again. For the rest of a recomputation see
Note: [Recomputation and hooks].

# Note: [In-place inputs and recomputation]
The second forward starts from the inputs' values at that time. A module that writes to its input, as an
in-place ReLU does, would start from its own result. torch detects this in the backward pass, but not for a
module inside another recomputed one (2.14). So such modules are refused when they write, and of nested
modules only the outer ones are wrapped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.checkpoint import checkpoint

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import RecomputationInGraph
from trocar_server.surgery.structure import leaves
from trocar_server.training.optim.foreach import copy_all
from trocar_server.training.step.rollback import buffer_places


@contextmanager
def activation_checkpointing(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Let calls of these modules inside the context save only their inputs.

        with activation_checkpointing({"layer1": model.layer1, "layer2": model.layer2}):
            loss = criterion(model(x), y)
            loss.backward()

    Gradients, random numbers and buffers are bit-equal to those without it. The backward pass may run after
    the context. A module inside another one of them is recomputed with that one.

    Args:
        modules: Modules by path.

    Raises:
        ServiceError: `TRAINER_INVALID`, in the forward pass: a module writes to its input. See
            Note: [In-place inputs and recomputation].
    """
    inner = {id(part) for module in modules.values() for part in module.modules() if part is not module}
    with ExitStack() as undo:
        for path, module in modules.items():
            if id(module) not in inner:
                _wrap(path, module, undo)
        yield


def models_own_checkpointing(model: nn.Module) -> AbstractContextManager[None]:
    """Let the parts that a model checkpoints itself have, inside the context, the results of other parts.

    Gradients, hooks on tensors, random numbers and buffers are as without checkpointing.
    """
    return RecomputationInGraph(lambda part: _Buffers(_module_of(part) or model).replayed)


def _module_of(part: Callable[..., Any]) -> nn.Module | None:
    """Return the module that a checkpointed function is, or of which it is a method."""
    while isinstance(part, partial):
        part = part.func
    owner = part if isinstance(part, nn.Module) else getattr(part, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _wrap(path: str, module: nn.Module, undo: ExitStack) -> None:
    forward: Callable[..., Any] = module.forward
    had_own = "forward" in vars(module)

    @wraps(forward)  # its signature names the inputs
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        taken = [leaf for _, leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in taken]
        with RecomputationInGraph(lambda _: _Buffers(module).replayed):
            output = checkpoint(forward, *args, use_reentrant=False, **kwargs)
        if versions != [tensor._version for tensor in taken]:
            raise _writes(path, module)
        return output

    def unwrap() -> None:
        if had_own:
            module.forward = forward
        else:
            del module.forward

    module.forward = checkpointed
    undo.callback(unwrap)


def _writes(path: str, module: nn.Module) -> ServiceError:
    return ServiceError(
        ErrorReason.TRAINER_INVALID,
        f"activation_checkpointing: '{path}' ({type(module).__name__}) writes to its input in place, so "
        "it cannot "
        "be recomputed; choose the module that contains it",
    )


class _Buffers:
    """The buffers of a module before its first forward. See Note: [Buffers and recomputation]."""

    def __init__(self, module: nn.Module) -> None:
        self._places = buffer_places(module)
        self._tensors = list({id(tensor): tensor for _, _, tensor in self._places}.values())
        self._before = [tensor.detach().clone() for tensor in self._tensors]

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Reset them inside the context."""
        present = [owner[name] for owner, name, _ in self._places]
        now = [tensor.detach().clone() for tensor in self._tensors]
        self._put([tensor for _, _, tensor in self._places], self._before)
        try:
            yield
        finally:
            self._put(present, now)

    def _put(self, buffers: Sequence[Tensor | None], values: list[Tensor]) -> None:
        """Put buffers into their places, and values into those from before the first forward."""
        if not self._tensors:
            return
        for (owner, name, _), buffer in zip(self._places, buffers, strict=True):
            owner[name] = buffer
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(self._tensors)):
            copy_all(self._tensors, values)
