"""Recurrent layers of a pass with gradients: those in eval mode run on kernels that have a derivative.

    with differentiable_recurrence(recurrent_layers(model)):
        model(batch).sum().backward()

# Note: [Recurrent layers in eval mode]
Hosted models are in eval mode, as are the frozen parts of a trainer. In eval mode cuDNN's LSTM, GRU and RNN
keep nothing for a backward pass, which is then refused: "cudnn RNN backward can only be called in training
mode" (torch 2.14). Train mode would switch their dropout on. torch's own kernels have a derivative in both
modes, so a layer that is in the graph runs its forward without cuDNN; the graph then has their backward.
Convolutions, and layers before the graph begins, keep cuDNN's kernels. The switch is of the whole process:
only the thread that owns the device calls torch there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from trocar_server.surgery.structure import leaves


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Return the recurrent layers of a model that are in eval mode."""
    return [part for part in model.modules() if isinstance(part, nn.RNNBase) and not part.training]


@contextmanager
def differentiable_recurrence(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let gradients go through recurrent layers in eval mode. See Note: [Recurrent layers in eval mode].

    The context includes the backward pass where parts are recomputed in it.

    Args:
        layers: From `recurrent_layers`.
    """
    with ExitStack() as undo:
        for layer in layers:
            _wrap(layer, undo)
        yield


def _wrap(layer: nn.Module, undo: ExitStack) -> None:
    own: dict[str, Any] = {name: value for name, value in vars(layer).items() if name == "forward"}
    forward: Callable[..., Any] = layer.forward

    @wraps(forward)  # its signature names the inputs
    def differentiable(*args: Any, **kwargs: Any) -> Any:
        if not _is_in_graph(layer, (args, kwargs)):
            return forward(*args, **kwargs)
        with _without_cudnn():
            return forward(*args, **kwargs)

    layer.forward = differentiable
    undo.callback(vars(layer).update, own)
    undo.callback(vars(layer).pop, "forward")


def _is_in_graph(layer: nn.Module, inputs: Any) -> bool:
    """Whether a call of a layer becomes part of the autograd graph."""
    if not torch.is_grad_enabled():
        return False
    given = (leaf for _, leaf in leaves(inputs) if isinstance(leaf, torch.Tensor))
    return any(tensor.requires_grad for tensor in (*given, *layer.parameters()))


@contextmanager
def _without_cudnn() -> Iterator[None]:
    # Not `cudnn.flags`, which also resets the precision of matrix products.
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before
