"""The traced graph of a model, with the node names of torchvision's feature extraction.

    traced = trace_graph(replica)
    traced.names                    # as `get_graph_node_names(model)[1]`
    traced.truncated("layer1")      # the last node inside `layer1`

A graph refers to modules and parameters by path, so one graph serves every replica; see `nodes`.
"""

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
import torchvision
from torch import fx, nn
from torchvision.models.feature_extraction import NodePathTracer

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line

_CONTENTS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class TracedGraph:
    """The traced computation of a model in eval mode, node by node.

    Attributes:
        graph: The graph, without weights.
        nodes: The nodes that have a name, in execution order, inputs of the model first.
        constants: Tensors that the model creates while it is traced, by their name in the graph. They
        have values only where the traced module had some.
    """

    graph: fx.Graph
    nodes: Mapping[str, fx.Node]
    constants: Mapping[str, Any]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Node names in execution order."""
        return tuple(self.nodes)

    @cached_property
    def called_modules(self) -> frozenset[str]:
        """Paths of the modules that a run of the graph calls, so their hooks run.

        The modules inside them are called too; those around them are not.
        """
        return frozenset(str(node.target) for node in self.graph.nodes if node.op == "call_module")

    def truncated(self, name: str) -> str | None:
        """Return the last node inside a container, as `create_feature_extractor` takes it, or None.

        `layer1` resolves to `layer1.1.relu_1`, the last node whose name begins with it up to a dot.
        """
        depth = name.count(".") + 1
        for node in reversed(self.names):
            if ".".join(node.split(".")[:depth]) == name:
                return node
        return None


def trace_graph(module: nn.Module) -> TracedGraph:
    """Trace a model in eval mode; the model is restored afterwards.

    Works on a meta replica too. But then a model that creates tensors while it is traced gives
    constants without values, and a graph that runs on meta only. Trace a replica with data.

    torch.fx patches `nn.Module.__call__` while it traces, for every thread of the process: no other
    thread may run a model at the same time.

    Raises:
        ServiceError: `NOT_TRACEABLE`, the model's Python code depends on its data, or a call runs more
        than the forward of its class.
    """
    if "forward" in vars(module) or module._forward_pre_hooks:
        raise not_traceable("it wraps its own call, which a graph would not contain")
    # As torchvision's `create_feature_extractor` sets it by default; otherwise the names would differ.
    tracer = NodePathTracer(
        autowrap_modules=(math, torchvision.ops), leaf_modules=_module_classes(torchvision.ops)
    )
    with _restored(module), torch.no_grad():
        module.eval()
        try:
            graph = tracer.trace(module)
        except Exception as error:
            raise not_traceable(f"its graph cannot be traced ({first_line(error)})") from error
        made = _attributes(module, graph)
    names = list(tracer.node_to_qualname.values())
    if len(set(names)) != len(names):
        raise not_traceable("two nodes of its graph would have the same name")
    nodes = {name: node for node, name in tracer.node_to_qualname.items()}
    return TracedGraph(graph, nodes, {name: made[name] for name in made if not hasattr(module, name)})


def not_traceable(why: str) -> ServiceError:
    """Build the error for a model without a usable graph."""
    return ServiceError(
        ErrorReason.NOT_TRACEABLE,
        f"the model has no fx nodes: {why}; select modules instead, without `fx:`",
    )


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules when the context ends.

    Tracing sets constants on the root, and proxies wherever a forward stores its result in an attribute.
    """
    before = [(part, dict(vars(part)), _contents(part)) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes, contents in before:
            vars(part).clear()
            vars(part).update(attributes)
            for name, content in contents.items():
                vars(part)[name].clear()
                vars(part)[name].update(content)


def _contents(module: nn.Module) -> dict[str, dict[str, Any]]:
    return {name: dict(vars(module)[name]) for name in _CONTENTS}


def _attributes(module: nn.Module, graph: fx.Graph) -> dict[str, Any]:
    """Return the attributes of the root that the graph refers to by plain name."""
    names = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    return {name: getattr(module, name) for name in names if "." not in name}


def _module_classes(package: ModuleType) -> list[type[nn.Module]]:
    classes = (member for _, member in inspect.getmembers(package, inspect.isclass))
    return [member for member in classes if issubclass(member, nn.Module)]
