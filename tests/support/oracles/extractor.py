"""torchvision's `create_feature_extractor` as the oracle of node values, without in-place writes.

It returns a value that a later node overwrites as it is after that. Here nothing is overwritten: modules
and functions are told not to work in place, and in-place operators are replaced by the plain ones.
"""

import copy
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import fx, nn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

_PLAIN: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}

_WRITES = re.compile(r".*([a-z]_|_add_rel_pos|_add_shortcut)(_\d+)?")
"""Names of nodes that write to their first argument: methods in place, and MViT's own functions."""


def node_names(model: nn.Module) -> list[str]:
    """Return torchvision's names of the nodes of the eval graph."""
    return list(get_graph_node_names(_copy(model), suppress_diff_warning=True)[1])


def extracted(
    model: nn.Module, batches: Sequence[Sequence[str]], inputs: Sequence[torch.Tensor]
) -> Iterator[dict[str, Any]]:
    """Yield the values of each batch of nodes by name, one pass for each so that memory is bounded."""
    plain = _copy(model)
    for part in plain.modules():
        if hasattr(part, "inplace"):
            part.inplace = False  # type: ignore[assignment]
    # torchvision drops a call whose result nobody uses, and so the write that it was for: MViT has some.
    writes = [name for name in chain(*batches) if _WRITES.fullmatch(name)]
    for names in batches:
        wanted = list(dict.fromkeys([*names, *writes]))
        extractor = create_feature_extractor(plain, wanted, suppress_diff_warning=True).eval()
        _without_writes(list(extractor.graph.nodes))
        extractor.recompile()
        with torch.inference_mode():
            yield extractor(*(tensor.clone() for tensor in inputs))


def _without_writes(nodes: Sequence[fx.Node]) -> None:
    for position, node in enumerate(nodes):
        target: Any = node.target
        if node.kwargs.get("inplace"):
            node.kwargs = {**node.kwargs, "inplace": False}
        if node.op == "call_function" and target in _PLAIN:
            node.target = _PLAIN[target]
        is_method = node.op == "call_method" and str(target).endswith("_")
        if is_method:
            node.target = str(target).rstrip("_")
        is_function = getattr(target, "__name__", "") in ("_add_rel_pos", "_add_shortcut")
        if is_function:
            node.target = _on_a_copy(target)
        if is_method or is_function:
            written = node.all_input_nodes[0]
            for user in set(written.users).intersection(nodes[position + 1 : -1]):  # the last is the output
                user.replace_input_with(written, node)


def _on_a_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def on_a_copy(written: torch.Tensor, *args: Any) -> Any:
        return function(written.clone(), *args)

    return on_a_copy


def _copy(model: nn.Module) -> nn.Module:
    """Copy the modules over the same weights."""
    shared = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
