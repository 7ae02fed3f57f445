"""Trial run of a traced graph: observes what its nodes really do.

Names in a graph are not enough: a user function may draw random numbers, and an operation may write into a
value that another one reads. So one batch runs node by node, and random states, tensor versions and memory
are compared before and after each node.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

_Store = int


@dataclass(eq=False)
class Trial:
    """Observations of a trial run.

    Attributes:
        values: The value of each node.
        moves: Volatile nodes, whose values may differ for the same sample next time, and the output.
        hazard: Why the constant nodes cannot run before the others; empty if they can.
    """

    values: dict[fx.Node, Any] = field(default_factory=dict)
    moves: set[fx.Node] = field(default_factory=set)
    hazard: str = ""
    _from_input: set[fx.Node] = field(default_factory=set)
    _read_by_moving: set[_Store] = field(default_factory=set)
    _written_by_moving: set[_Store] = field(default_factory=set)

    def depends_on_input(self, node: fx.Node) -> bool:
        """Whether a node's value depends on the model's inputs."""
        return node in self._from_input

    def is_written_twice(self, crossing: list[fx.Node]) -> bool:
        """Whether two values that cross share memory that a volatile node writes to."""
        stores = [_store(self.values[node]) for node in crossing]
        return any(stores.count(store) > 1 for store in self._written_by_moving)

    def is_written(self, crossing: list[fx.Node]) -> bool:
        """Whether a volatile node writes into one of these values."""
        return any(_store(self.values[node]) in self._written_by_moving for node in crossing)

    def note(self, node: fx.Node, value: Any, arguments: list[Tensor], written: list[Tensor]) -> None:
        """Record the effects of a node."""
        self.values[node] = value
        if node.op == "placeholder" or any(part in self._from_input for part in node.all_input_nodes):
            self._from_input.add(node)
        read, wrote = {_store(tensor) for tensor in arguments}, {_store(tensor) for tensor in written}
        if node in self.moves:
            self._read_by_moving |= read
            self._written_by_moving |= wrote
        elif read & self._written_by_moving:
            self.hazard = self.hazard or f"'{node.name}' reads what the trained part wrote in place"
        elif wrote & self._read_by_moving:
            self.hazard = self.hazard or f"'{node.name}' overwrites in place what the trained part reads"


def run_trial(
    whole: fx.GraphModule, arguments: tuple[Any, ...], moves: set[fx.Node], module: nn.Module
) -> Trial:
    """Run a graph once and restore buffers and random state.

    Args:
        whole: A graph over the module's own parts.
        arguments: One batch.
        moves: Nodes known to be volatile; those found during the run are added.
        module: The module whose buffers are restored.
    """
    interpreter, nodes = fx.Interpreter(whole), list(whole.graph.nodes)
    trial = Trial(moves=set(moves))
    interpreter.args_iter = iter(arguments)
    with undone(module):
        for node in nodes:
            if node.op != "output":
                _run_node(interpreter, node, trial)
    return trial


def _run_node(interpreter: fx.Interpreter, node: fx.Node, trial: Trial) -> None:
    if any(argument in trial.moves for argument in node.all_input_nodes):
        trial.moves.add(node)
    arguments = list(_tensors_in([interpreter.env[part] for part in node.all_input_nodes]))
    versions = [tensor._version for tensor in arguments]
    before = random_state()
    value = interpreter.run_node(node)
    interpreter.env[node] = value
    outputs = list(_tensors_in(value))
    is_grown = any(tensor.requires_grad for tensor in outputs)
    if is_grown or random_state() != before:
        trial.moves.add(node)
    written = [
        tensor for tensor, version in zip(arguments, versions, strict=True) if tensor._version != version
    ]
    # A result that shares memory with an argument (a view) is an alias of it.
    trial.note(node, value, arguments, written)


def random_state() -> tuple[object, ...]:
    """Return the states of the global generators of torch, Python and NumPy, for comparison."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    kind, words, *rest = np.random.get_state(legacy=True)
    of_numpy = (kind, np.asarray(words).tobytes(), *rest)
    return (*(state.numpy().tobytes() for state in states), random.getstate(), of_numpy)


@contextmanager
def undone(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of a module and torch's random state after the context."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in kept:
                    buffer.copy_(value)


def _store(value: Any) -> _Store:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
