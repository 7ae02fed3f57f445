"""Volatile parts: modules and functions whose result for the same sample may change between epochs.

`why_it_moves` checks one module by itself, in its current mode; `does_function_move` checks a function of a
traced graph. Other cases are found when the graph runs: see `trial_run`.
"""

import operator
from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd
from torchvision.ops import StochasticDepth

_ALWAYS_RANDOM = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_RANDOM_IN_TRAINING = (_DropoutNd, nn.RReLU, StochasticDepth)
_WITH_DROPOUT = (nn.MultiheadAttention, nn.RNNBase)
_RISKY_WORDS = (
    "dropout", "rand", "bernoulli", "multinomial", "normal_", "uniform_", "stochastic_depth", "rrelu",
    "batch_norm", "instance_norm",
)  # fmt: skip
_HARMLESS = (operator.getitem, getattr)


def why_it_moves(module: nn.Module) -> str | None:
    """Return why a module, without its submodules, is volatile; None if it is constant."""
    if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
        return "it is trained"
    if isinstance(module, _ALWAYS_RANDOM):
        return "it draws random numbers"
    if not module.training:
        return None
    if isinstance(module, _RANDOM_IN_TRAINING) or (isinstance(module, _WITH_DROPOUT) and module.dropout > 0):
        return "it draws random numbers"
    if any(True for _ in module.buffers(recurse=False)):
        return "it keeps running statistics"
    return None


def moving_paths(module: nn.Module) -> dict[str, str]:
    """Return the modules of a tree that are volatile by themselves: reasons by path."""
    reasons = {path: why_it_moves(part) for path, part in module.named_modules()}
    return {path: reason for path, reason in reasons.items() if reason}


def does_function_move(node: fx.Node) -> bool:
    """Whether a function or method of a graph is random or keeps statistics, judged by its name.

    `F.dropout(x, training=False)` does not.
    """
    if node.op not in ("call_function", "call_method") or node.target in _HARMLESS:
        return False
    name = node.target if isinstance(node.target, str) else _name_of(node.target)
    if not any(word in name for word in _RISKY_WORDS):
        return False
    return node.kwargs.get("training", True) is not False


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))
