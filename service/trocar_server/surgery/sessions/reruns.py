"""Reruns: modules that a model's own functions of autograd call again in the backward pass.

    with NoReruns(model, ["layers.0.attention"]):
        model(batch).sum().backward()

Reversible layers (Reformer) save no activations: their first forward has no graph, and the backward function
calls their modules again. What a session has attached belongs to the first call: edits are not made in the
second one, rules and losses at its values have no effect, so gradients would be those of another pass.
PyTorch's own checkpointing is not meant: see Note: [Recomputation and hooks].
"""

from collections.abc import Collection
from functools import partial

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.sessions.hooks import Session
from trocar_server.surgery.sessions.recomputation import is_recomputing


class NoReruns(Session):
    """Refuses backward passes inside the context that call one of these modules.

    Args:
        model: The tree.
        paths: Paths of the modules to which something is attached.

    Raises:
        ServiceError: In the backward pass: `NOT_DIFFERENTIABLE`.
    """

    def __init__(self, model: nn.Module, paths: Collection[str]) -> None:
        self._model = model
        self._paths = paths

    def _open(self) -> None:
        for path in self._paths:
            module = self._model.get_submodule(path)
            self._handles.callback(module.register_forward_pre_hook(partial(_check, path)).remove)


def call_again(path: str, count: int) -> int:
    """Return the index of a call that is recomputed, of a module that was called so often.

    Raises:
        ServiceError: `NOT_DIFFERENTIABLE`, which of several calls it is cannot be told.
    """
    if count == 1:
        return 0
    raise ServiceError(
        ErrorReason.NOT_DIFFERENTIABLE,
        f"'{path}' is called {count} times in a pass, inside a part that is computed again in the backward "
        "pass: which of its calls is repeated cannot be told, so it cannot be edited there; switch "
        "activation checkpointing off for that part, or edit another value",
        name=path,
    )


def _check(path: str, *_: object) -> None:
    if torch._C._current_graph_task_id() < 0 or is_recomputing():
        return
    raise ServiceError(
        ErrorReason.NOT_DIFFERENTIABLE,
        f"'{path}' is called again in the backward pass, by a function of autograd of the model's own (as "
        "in reversible layers), without what is attached to its first call; choose a module around that "
        "part, or leave out edits, rules, losses and gradients there",
        name=path,
    )
