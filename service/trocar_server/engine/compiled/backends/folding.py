"""Batch-norm folding: batch norms merged into the convolution before them, where that is possible."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from trocar_server.engine.compiled.backends.recipe import Recipe
from trocar_server.surgery import Target

Pair = tuple[str, str]
"""The module paths of a convolution and of the batch norm that is the only consumer of its output."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def find_pairs(model: nn.Module) -> list[Pair]:
    """Return the pairs that can be folded, by tracing the model; none where it cannot be traced.

    Each module of a pair is called once in a pass, and nothing else reads the convolution's output.
    torch.fx changes torch while it traces: never call this beside passes of the same process.
    """
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception:  # noqa: BLE001 - tracing a model may raise anything
        return []
    calls = [node for node in graph.nodes if node.op == "call_module"]
    counts = {target: sum(node.target == target for node in calls) for target in {n.target for n in calls}}
    modules = dict(model.named_modules())
    pairs = []
    for node in calls:
        before = node.args[0] if node.args else None
        if _is_pair(before, node, modules) and counts[node.target] == counts[before.target] == 1:  # type: ignore[union-attr]
            pairs.append((str(before.target), str(node.target)))  # type: ignore[union-attr]
    return pairs


def _is_pair(before: Any, node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if not (isinstance(before, fx.Node) and before.op == "call_module" and len(before.users) == 1):
        return False
    convolution, norm = modules[str(before.target)], modules[str(node.target)]
    has_statistics = isinstance(norm, _NORMS) and norm.track_running_stats and not norm.training
    return has_statistics and type(convolution) in _CONVOLUTIONS


def without_taps_between(pairs: Sequence[Pair], recipe: Recipe) -> list[Pair]:
    """Leave out the pairs between which a value is wanted: folding removes that value."""
    return [pair for pair in pairs if not any(_is_between(target, *pair) for target in recipe.targets)]


def _is_between(target: Target, convolution: str, norm: str) -> bool:
    """Whether a target may be the value between the two; a module that ends or begins there counts too."""
    before, behind = _holds(target.path, convolution), _holds(target.path, norm)
    return behind and not before if target.port.startswith("in") else before and not behind


def _holds(path: str, inner: str) -> bool:
    return path in ("", inner) or inner.startswith(f"{path}.")


def fold(tree: nn.Module, pairs: Sequence[Pair]) -> None:
    """Fold pairs of a module tree in place; weights shared with another tree are unchanged."""
    for convolution, norm in pairs:
        with torch.no_grad():
            fused: nn.Module = fuse_conv_bn_eval(tree.get_submodule(convolution), tree.get_submodule(norm))  # type: ignore[arg-type,type-var]
        _replace(tree, convolution, fused.requires_grad_(False))
        _replace(tree, norm, nn.Identity())


def _replace(tree: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(tree.get_submodule(parent), name, module)
