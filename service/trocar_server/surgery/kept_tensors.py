"""Tensors that a model keeps from pass to pass, across passes with and without gradients.

# Note: [Kept tensors and graphs]
A buffer that a pass with gradients writes to becomes part of the graph. It would keep that pass's values
alive and fail the next backward pass. A tensor made in a pass in inference mode cannot be saved for a
backward pass (torch 2.14). The server causes both, so it reverts both.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

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
    """Replace the buffers and plain tensors of a model, also those in dicts, lists and tuples.

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
        if isinstance(value, _KEEPING):
            new = _changed(value, change, seen)
            if new is not value:
                owner[key] = new


_KEEPING = (torch.Tensor, dict, list, tuple)


def _changed(value: Any, change: Change, seen: dict[int, Any]) -> Any:
    """Return what takes the place of a value: dicts and lists are changed themselves, tuples made anew."""
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
    else:
        items = [_changed(item, change, seen) if isinstance(item, _KEEPING) else item for item in value]
        if any(mine is not theirs for mine, theirs in zip(items, value, strict=True)):
            new = tuple_like(value, items)
    seen[id(value)] = value, new
    return new
