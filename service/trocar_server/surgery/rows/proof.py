"""Proof that each row of a traced pass depends on its own row of the inputs alone.

    program = torch.export.export(model, (torch.rand(2, 3, 8, 8),), dynamic_shapes=({0: Dim("batch")},))
    why_mixed(program.run_decompositions({}))    # "" where it is proved; else what may mix rows

# Note: [Independent rows]
The trace is functional: a write through a view is an operator with a result. The number of rows n is a
symbol in it, so every use of n is seen: as a size, a number or a condition, which the trace refuses. Operator
by operator one statement is kept: *an element that belongs to row b depends on row b of the inputs and on
constants, and not on n*. A tensor that grows with n has one dimension for it, exactly where `Rows` says; any
other tensor is constant. An operator without a rule, a random one, and one that reads another row or n in any
way ends the proof. Rules are torch's documented semantics of each operator; what a result's shape shows is
compared with them. A symbolic n is at least 2 for torch, so a trace with one row has to take the same path.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from trocar_server.surgery.axes.operation import name_of
from trocar_server.surgery.rows import computing, moving
from trocar_server.surgery.rows.call import Call, Places
from trocar_server.surgery.rows.moving import Rule
from trocar_server.surgery.rows.place import MixedRowsError, Rows, dim_of_rows, sizes_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_RULES: dict[str, Rule] = {**moving.RULES, **computing.RULES}
_DRAW_BY_ARGUMENT = (computing.attention, computing.recurrent)
"""Rules of operators that are random only with dropout, which they refuse."""
_LAYOUT = frozenset(
    ("view", "_unsafe_view", "reshape", "view_copy", "clone", "contiguous", "alias", "expand", "sym_size")
)
"""Operators of which a pass needs more or less by the sizes alone."""


def why_mixed(program: ExportedProgram, output_count: int | None = None) -> str:
    """Return why rows may depend on each other; empty where each is proved to depend on its own alone.

    Args:
        program: A functional trace of a pass whose inputs all have the rows in their first dimension, which
            is symbolic.
        output_count: How many of its outputs count, from the first; all by default.
    """
    signature = program.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        return "the model writes to its own tensors or to its inputs"
    nodes = {node.name: node for node in program.graph.nodes}
    inputs = [nodes[str(name)] for name in signature.user_inputs if str(name) in nodes]
    outputs = [nodes.get(str(name)) for name in list(signature.user_outputs)[:output_count]]
    size = inputs[0].meta["val"].shape[0] if inputs else None
    if not isinstance(size, torch.SymInt):
        return "the pass was traced for one number of rows"
    walk = _Walk(inputs, size.node.expr)
    for node in outputs:
        reason = "an output is no tensor" if node is None else walk.why_mixed(node)
        if reason:
            return reason
    return ""


def why_other_alone(many: ExportedProgram, alone: ExportedProgram) -> str:
    """Return how a pass with one row differs from one with several; empty where it takes the same path.

    Args:
        many: A functional trace for any number of rows.
        alone: The same for one row.
    """
    for ours, theirs in zip_longest(_path(many), _path(alone)):
        if ours != theirs:
            return f"with one row it computes {_text(theirs)}, with several {_text(ours)}"
    return ""


def _path(program: ExportedProgram) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the operators that compute, with the rank of their results and their numbers, but for sizes."""
    for node in program.graph.nodes:
        func = node.target
        if node.op != "call_function" or not isinstance(func, torch._ops.OpOverload):
            continue
        name = name_of(func)
        if name in _LAYOUT or not func._schema.returns:
            continue
        numbers = [] if name in moving.TAKE_ROW_COUNTS else [*node.args, *node.kwargs.values()]
        value = node.meta["val"]
        values = value if isinstance(value, list | tuple) else [value]
        ranks = [one.dim() for one in values if isinstance(one, Tensor)]
        yield name, (*ranks, *(n for n in numbers if isinstance(n, bool | int | float | str)))


def _text(step: tuple[str, tuple[Any, ...]] | None) -> str:
    return "nothing" if step is None else f"{step[0]}{step[1] or ''}"


class _Walk:
    """Where the rows are in each result of a traced pass, for a symbol of their number."""

    def __init__(self, inputs: Sequence[Node], symbol: Any) -> None:
        self._symbol = symbol
        self._places: dict[Node, Places] = dict.fromkeys(inputs, Rows(0))
        self._walked = set(inputs)

    def why_mixed(self, output: Node) -> str:
        """Return why rows of an output may depend on each other."""
        for node in output.graph.nodes:
            if node in self._walked or node not in _needed_by(output):
                continue
            self._walked.add(node)
            try:
                self._places[node] = self._place(node)
            except MixedRowsError as error:
                return f"{_described(node)}: {error}"
        if self._places.get(output) != Rows(0):
            return "a value has no rows in its first dimension"
        return ""

    def _place(self, node: Node) -> Places:
        """Return where the rows are in a result; checked against its shape."""
        value = node.meta.get("val")
        if node.op in ("placeholder", "get_attr") or not isinstance(value, Tensor | list | tuple):
            return None  # a weight, or a number made of sizes
        place = self._item(node) if node.target is operator.getitem else self._of_call(node)
        if isinstance(value, Tensor) and not isinstance(place, Sequence):
            self._check(value, place)
        return place

    def _item(self, node: Node) -> Rows | None:
        source, number = node.args
        places = self._places.get(source) if isinstance(source, Node) else None
        if not isinstance(places, Sequence) or not isinstance(number, int):
            raise MixedRowsError("it takes an item of what is no list")
        return places[number]

    def _of_call(self, node: Node) -> Places:
        if not isinstance(node.target, torch._ops.OpOverload):
            raise MixedRowsError("an operator without a rule")
        call = Call(node, self._places, self._symbol)
        rule, tags = _RULES.get(call.name), call.func.tags
        if rule is None and torch.Tag.pointwise in tags:
            rule = computing.elementwise
        is_random = torch.Tag.nondeterministic_seeded in tags and rule not in _DRAW_BY_ARGUMENT
        is_known = call.func.namespace == "aten" and not (is_random or call.func._schema.is_mutable)
        if (
            is_known
            and not call.has_row_counts
            and all(call.places(tensor) is None for tensor in call.tensors)
        ):
            return [None] * call.output_count if call.output_count > 1 else None
        if rule is None or not is_known:
            raise MixedRowsError("an operator without a rule")
        if call.has_row_counts and call.name not in moving.TAKE_ROW_COUNTS:
            raise MixedRowsError("it computes with the number of rows")
        try:
            return rule(call)
        except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError):
            raise MixedRowsError("a form of the operator without a rule") from None

    def _check(self, value: Tensor, place: Rows | None) -> None:
        """Compare what a rule says with the shape of the result."""
        sizes = sizes_of(value, self._symbol)
        dim = dim_of_rows(sizes)
        if place is None and dim is not None:
            raise MixedRowsError("a constant grows with the number of rows")
        if place is None or dim is None:
            is_right = place is None and dim is None
        else:
            is_right = (dim, sizes[dim].length) == (place.dim, place.before * place.after)
        if not is_right:
            raise MixedRowsError("its result has rows elsewhere")


def _needed_by(output: Node) -> set[Node]:
    """Return the nodes that a node depends on, and itself."""
    needed, rest = {output}, [output]
    while rest:
        new = [node for node in rest.pop().all_input_nodes if node not in needed]
        needed.update(new)
        rest += new
    return needed


def _described(node: Node) -> str:
    stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {"": ("", None)}
    path = [*stack.values()][-1][0]
    return f"{node.target} in '{path}'" if path else str(node.target)
