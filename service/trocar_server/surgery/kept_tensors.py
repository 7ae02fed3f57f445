"""Tensors that a model keeps from pass to pass, across passes with and without gradients.

# Note: [Kept tensors and graphs]
A buffer that a pass with gradients writes to becomes part of the graph. It would keep that pass's values
alive and fail the next backward pass. A tensor made in a pass in inference mode cannot be saved for a
backward pass (torch 2.14). The server causes both, so it reverts both.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.structure import tuple_like

Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Returns the tensor that takes the place of another one; the same where nothing is to be done."""


@contextmanager
def graphs_end_here(model: nn.Module) -> Iterator[None]:
    """Context for a pass with gradients, backward included; no kept tensor refers to its graph afterwards.

    See Note: [Kept tensors and graphs].
    """
    _allow_graphs(model)
    try:
        yield
    finally:
        _drop_graphs(model)


def clear_caches(model: nn.Module) -> None:
    """Clear function caches (`functools.lru_cache`) in the files and classes of a model's modules.

    They may keep tensors made in inference mode, and give no access to them.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if not _is_foreign(kind)}
    files = {kind.__module__ for kind in kinds}
    for scope in [*map(vars, kinds), *(vars(sys.modules[file]) for file in files & sys.modules.keys())]:
        for value in list(scope.values()):
            function = getattr(value, "__func__", value)  # of a static method or a class method
            if isinstance(function, _CACHE):
                function.cache_clear()


_CACHE: type[Any] = type(lru_cache(lambda: None))


# Note: [Inference mode]
# It saves some time, and two kinds of models do not run in it (torch 2.14): those that derive in their own
# forward, as forces from an energy are, and those that keep tensors where `graphs_end_here` does not reach,
# in a function's cache for example, and are then asked for gradients. They are known by torch's messages.
def needs_autograd(problem: ServiceError) -> bool:
    """Whether a pass failed because its model, or an earlier pass of it, ran in inference mode."""
    return problem.reason is ErrorReason.INPUT_REJECTED and is_of_inference_mode(problem.message)


def is_of_inference_mode(message: str) -> bool:
    """Whether the message of an error is one of torch's about tensors made in inference mode."""
    return any(words in message for words in _OF_INFERENCE_MODE)


_OF_INFERENCE_MODE = (
    "Inference tensors cannot be saved for backward",
    "inference tensor outside InferenceMode",
    "does not require grad",
)


def _drop_graphs(model: nn.Module) -> None:
    def without_graph(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        # In place where possible: other replicas share this object.
        return tensor.detach() if tensor._is_view() else tensor.detach_()

    _change_kept(model, without_graph)


def _allow_graphs(model: nn.Module) -> None:
    _change_kept(model, lambda tensor: tensor.clone() if tensor.is_inference() else tensor)


_TABLES = frozenset(vars(nn.Module()))
"""Attributes in which torch keeps parameters, buffers, submodules and hooks."""


def _change_kept(model: nn.Module, change: Change) -> None:
    """Replace the buffers and plain tensors of a model, also those in dicts, lists, tuples and plain objects.

    Parameters are left alone: torch keeps those of recurrent layers in lists, too.
    """
    seen: dict[int, Any] = {}
    for module in model.modules():
        _change_items(module._buffers, module._buffers, change, seen)
        _change_items(vars(module), vars(module).keys() - _TABLES, change, seen)


def _change_items(
    owner: MutableMapping[Any, Any] | list[Any], keys: Iterable[Any], change: Change, seen: dict[int, Any]
) -> None:
    for key in list(keys):
        value = owner[key]
        if _may_keep(value):
            new = _changed(value, change, seen)
            if new is not value:
                owner[key] = new


_KEEPING = (torch.Tensor, dict, list, tuple)
_FOREIGN = sys.stdlib_module_names | {"torch"}


def _may_keep(value: Any) -> bool:
    """Whether a value is or may hold a kept tensor: a structure, or an object of the model's own code."""
    if isinstance(value, _KEEPING):
        return True
    is_kind = isinstance(value, nn.Module | type) or _is_foreign(type(value))
    return hasattr(value, "__dict__") and not is_kind


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FOREIGN


def _changed(value: Any, change: Change, seen: dict[int, Any]) -> Any:
    """Return what takes the place of a value: only tensors and tuples are made anew, all else is changed."""
    if id(value) in seen:
        return seen[id(value)][1]
    seen[id(value)] = value, value  # kept alive, so that no other object has its id
    new = value
    if isinstance(value, torch.Tensor):
        new = value if isinstance(value, nn.Parameter) else change(value)
    elif isinstance(value, dict):
        _change_items(value, value, change, seen)
    elif isinstance(value, list):
        _change_items(value, range(len(value)), change, seen)
    elif not isinstance(value, tuple):
        _change_items(vars(value), vars(value), change, seen)
    else:
        items = [_changed(item, change, seen) if _may_keep(item) else item for item in value]
        if any(mine is not theirs for mine, theirs in zip(items, value, strict=True)):
            new = tuple_like(value, items)
    seen[id(value)] = value, new
    return new
