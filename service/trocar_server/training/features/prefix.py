"""Prefix split: cuts a model into a constant prefix and a trainable tail.

    split = split_prefix(trainer_module, (images,), other_arguments=(images[:-1],))
    features = split.prefix(images)             # the same in every epoch
    with split.in_place_of(trainer_module):
        output = trainer_module(*features)      # the modules, weights and hooks of the tail are the trainer's

The split is made in the traced graph, in the modules' current modes. A node belongs to the tail if it is
volatile: it depends on something trained, random, or with running statistics. Values that cross the split are
tensors whose first dimension is the batch; all others are recomputed in the tail.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
from torch import Tensor, fx, nn

from trocar_server.errors import first_line
from trocar_server.models.replicas import make_replica
from trocar_server.training.features.trial_run import Trial, random_state, run_trial, undone
from trocar_server.training.features.volatile_parts import does_function_move, moving_paths

_PLAIN = (int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device)


class NoSplitError(Exception):
    """There is no exact split; the message is for people."""


@dataclass(frozen=True, eq=False)
class Split:
    """A model in two parts, over its own modules and weights.

    Attributes:
        prefix: Takes the model's arguments, returns a tuple of the values that cross.
        tail: Takes these values, returns the model's output.
        names: Names of the values that cross.
        prefix_modules: Modules that the prefix calls.
        overwrites: Whether the tail writes into values that cross, so that they serve one pass only.
    """

    prefix: fx.GraphModule
    tail: fx.GraphModule
    names: tuple[str, ...]
    prefix_modules: tuple[str, ...]
    overwrites: bool

    @contextmanager
    def in_place_of(self, module: nn.Module) -> Iterator[None]:
        """Replace the module's forward by the tail inside the context; the module's own hooks still run."""
        vars(module)["forward"] = self.tail.forward
        try:
            yield
        finally:
            del vars(module)["forward"]


def split_prefix(
    module: nn.Module,
    arguments: tuple[Any, ...],
    other_arguments: tuple[Any, ...],
    *,
    needed: Collection[str] = (),
    moving: Collection[str] = (),
) -> Split:
    """Split a model before the first value that may change from epoch to epoch.

    The model runs three times; its buffers and torch's random state are restored.

    Args:
        module: In the modes in which it will run.
        arguments: One batch.
        other_arguments: One batch of another size.
        needed: Paths of modules that must be called, because they have hooks.
        moving: Paths of modules that are volatile for other reasons.

    Raises:
        NoSplitError: There is no exact split.
    """
    graph, made = _trace(module, frozenset(needed), frozenset(moving))
    whole = _over(module, made, graph)
    moves = _moving_nodes(whole.graph, module, frozenset(needed) | frozenset(moving))
    other = run_trial(whole, other_arguments, moves, module)
    trial = run_trial(whole, arguments, other.moves, module)
    if trial.hazard or other.hazard:
        raise NoSplitError(trial.hazard or other.hazard)
    _check_calls(whole.graph, needed)
    graph = whole.graph
    crossing, constants = _cut(graph, trial, other, arguments, other_arguments)
    if trial.is_written_twice(crossing):
        raise NoSplitError("the trained part overwrites a value that it also reads under another name")
    still = [node for node in graph.nodes if node not in trial.moves and node.op == "call_module"]
    modules = tuple(str(node.target) for node in still)
    if not any(True for path in modules for _ in module.get_submodule(path).parameters()):
        raise NoSplitError("no frozen module runs before the trained part")
    prefix = _over(module, made, _prefix_graph(graph, trial, crossing))
    tail = _over(module, made, _tail_graph(graph, trial, crossing, constants))
    return Split(prefix, tail, tuple(node.name for node in crossing), modules, trial.is_written(crossing))


class _CutTracer(fx.Tracer):
    """Traces into a module only if some of its parts are volatile and others are not."""

    def __init__(self, moving: frozenset[str], needed: frozenset[str]) -> None:
        super().__init__(autowrap_modules=(math, torchvision.ops))  # type: ignore[arg-type]
        self.proxy_buffer_attributes = True
        self._moving = moving
        self._needed = needed

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        path = module_qualified_name
        if super().is_leaf_module(m, path) or path in self._needed or _is_hooked(m):
            return True
        if all(parameter.requires_grad for parameter in m.parameters()) and any(True for _ in m.parameters()):
            return True
        return not any(_is_within(other, path) for other in (*self._moving, *self._needed))


def _is_hooked(module: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in vars(module) or any(vars(module).get(kind) for kind in kinds)


def _trace(
    module: nn.Module, needed: frozenset[str], moving: frozenset[str]
) -> tuple[fx.Graph, dict[str, Any]]:
    """Return the graph and the constants that tracing made, by name."""
    if "forward" in vars(module) or module._forward_pre_hooks:
        raise NoSplitError("the model wraps its own call")
    replica = make_replica(module)  # attributes that tracing sets are discarded with it
    tracer = _CutTracer(frozenset(moving_paths(module)) | moving, needed)
    before = random_state()
    try:
        with undone(module):
            graph = tracer.trace(replica)
            is_random = random_state() != before
    except Exception as error:  # any error of the model's own code on a proxy
        raise NoSplitError(f"its graph cannot be traced ({first_line(error)})") from error
    if is_random:
        raise NoSplitError("its own code draws random numbers")
    names = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(
        module.named_buffers(remove_duplicate=False)
    )
    return graph, {name: _attribute(replica, name) for name in names if name not in own}


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _over(module: nn.Module, made: Mapping[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Return a graph module over the module's own parts."""
    targets = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    root = {path: made[path] if path in made else _attribute(module, path) for path in targets}
    return fx.GraphModule(root, graph, class_name=type(module).__name__)


def _moving_nodes(graph: fx.Graph, module: nn.Module, also: frozenset[str]) -> set[fx.Node]:
    """Return the nodes that are volatile by themselves or because of their arguments."""
    reasons = {*moving_paths(module), *also}
    moves: set[fx.Node] = set()
    for node in graph.nodes:
        path = str(node.target)
        is_mover = (
            node.op == "output"
            or any(argument in moves for argument in node.all_input_nodes)
            or (node.op == "call_module" and any(_is_within(other, path) for other in reasons))
            or (node.op == "get_attr" and _is_moving_tensor(module, path, reasons, also))
            or does_function_move(node)
        )
        if is_mover:
            moves.add(node)
    return moves


def _is_within(path: str, other: str) -> bool:
    """Whether a module is another one or inside it."""
    return path == other or path.startswith(f"{other}.")


def _check_calls(graph: fx.Graph, needed: Collection[str]) -> None:
    called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    for path in needed:
        if path and not any(_is_within(path, other) for other in called):
            raise NoSplitError(f"'{path}' is hooked, and its graph does not call it")


def _is_moving_tensor(module: nn.Module, path: str, movers: Collection[str], also: Collection[str]) -> bool:
    owner, _, name = path.rpartition(".")
    value = (
        _attribute(module.get_submodule(owner), name) if hasattr(module.get_submodule(owner), name) else None
    )
    if isinstance(value, nn.Parameter):
        return value.requires_grad or owner in also
    return owner in movers


def _cut(
    graph: fx.Graph,
    trial: Trial,
    other: Trial,
    arguments: tuple[Any, ...],
    other_arguments: tuple[Any, ...],
) -> tuple[list[fx.Node], dict[fx.Node, Any]]:
    """Return the nodes whose values cross, and those whose values are the same for every batch.

    Nodes that are neither move to the tail, until none is left.
    """
    sizes = (len(arguments[0]), len(other_arguments[0]))
    while True:
        crossing: list[fx.Node] = []
        constants: dict[fx.Node, Any] = {}
        pushed = False
        for node in graph.nodes:
            if node in trial.moves or not any(user in trial.moves for user in node.users):
                continue
            first, second = trial.values[node], other.values[node]
            if not trial.depends_on_input(node):
                continue
            if _is_batch(first, sizes[0]) and _is_batch(second, sizes[1]) and _are_alike(first, second):
                crossing.append(node)
            elif isinstance(first, _PLAIN) and first == second:
                constants[node] = first
            elif node.op == "placeholder":
                raise NoSplitError(f"the trained part needs the input '{node.name}', which is not one tensor")
            else:
                trial.moves.add(node)
                pushed = True
        if not pushed:
            return crossing, constants


def _is_batch(value: Any, size: int) -> bool:
    """Whether a value is a tensor with a row of its own memory for each sample."""
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != size:
        return False
    if value.layout != torch.strided or value.is_conj() or value.is_neg():
        return False
    return all(stride > 0 or length <= 1 for stride, length in zip(value.stride(), value.shape, strict=True))


def _are_alike(first: Tensor, second: Tensor) -> bool:
    return first.shape[1:] == second.shape[1:] and first.dtype == second.dtype


def _prefix_graph(graph: fx.Graph, trial: Trial, crossing: list[fx.Node]) -> fx.Graph:
    result, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node not in trial.moves:
            copies[node] = result.node_copy(node, lambda old: copies[old])
    result.output(tuple(copies[node] for node in crossing))
    return result


def _tail_graph(
    graph: fx.Graph, trial: Trial, crossing: list[fx.Node], constants: Mapping[fx.Node, Any]
) -> fx.Graph:
    result = fx.Graph()
    copies: dict[fx.Node, Any] = {node: result.placeholder(node.name) for node in crossing}
    for node in graph.nodes:
        if node in constants or node in copies:
            continue
        # Nodes independent of the inputs are recomputed: they cost little and have no row per sample.
        if node in trial.moves or not trial.depends_on_input(node):
            copies[node] = _copy_node(result, node, copies, constants)
    return result


def _copy_node(
    result: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, Any], constants: Mapping[fx.Node, Any]
) -> fx.Node:
    def argument(old: fx.Node) -> Any:
        return constants[old] if old in constants else copies[old]

    if node.op == "output":
        end: fx.Node = result.output(fx.map_arg(node.args[0], argument))
        return end
    copied: fx.Node = result.create_node(
        node.op, node.target, fx.map_arg(node.args, argument), fx.map_arg(node.kwargs, argument), node.name
    )
    return copied
