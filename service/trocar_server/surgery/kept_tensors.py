"""Tensors that a model keeps from pass to pass, across passes with and without gradients.

# Note: [Kept tensors and graphs]
A buffer that a pass with gradients writes to becomes part of the graph. It would keep that pass's values
alive and fail the next backward pass. A tensor made in a pass in inference mode cannot be saved for a
backward pass (torch 2.14). The server causes both, so it reverts both.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


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
    for owner, name, tensor in _kept(model):
        if not tensor.requires_grad:
            continue
        if tensor._is_view():
            owner[name] = tensor.detach()
        else:
            tensor.detach_()  # in place: other replicas share this object


def _allow_graphs(model: nn.Module) -> None:
    for owner, name, tensor in _kept(model):
        if tensor.is_inference():
            owner[name] = tensor.clone()


def _kept(model: nn.Module) -> Iterator[tuple[MutableMapping[str, Any], str, torch.Tensor]]:
    for module in model.modules():
        for owner in (module._buffers, vars(module)):
            for name, value in list(owner.items()):
                if isinstance(value, torch.Tensor):
                    yield owner, name, value
