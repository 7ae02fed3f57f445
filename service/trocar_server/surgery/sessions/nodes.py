"""Graph interpreter: values of the nodes of a traced graph, recorded or collected.

    traced = trace_graph(replica)
    records = record_nodes(meta_replica, traced, [torch.empty(8, 3, 224, 224, device="meta")])
    session = NodeSession(traced, targets)
    session.run(replica, [batch])
    session.values

The graph is run by an interpreter on the replica itself: nothing is copied or compiled, and every
module that is called runs with its hooks. A value is freed after its last use, as in an eager pass.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from trocar_server.errors import first_line
from trocar_server.surgery.guard import PassGuard
from trocar_server.surgery.ports import UNNAMED, CallPorts
from trocar_server.surgery.recording.graph import TracedGraph, not_traceable
from trocar_server.surgery.recording.recording import ModuleRecord, Recorder
from trocar_server.surgery.recording.writes import WriteWatch
from trocar_server.surgery.sessions.taps import Collector, StopForward, Target, by_call


class NodeSession:
    """Collects values of nodes from one run of a traced graph.

    A value that the model later overwrites is cloned when its target says so; torchvision's own
    extractor returns such values overwritten. The run ends after the last needed node; `stopped_at`
    then names it.

    Args:
        traced: The graph of the model.
        targets: The values to collect; `path` is a node name and the call index is 0.
        collector: Shared with the other sessions of the pass, or None for one of its own.
    """

    def __init__(
        self, traced: TracedGraph, targets: Sequence[Target], collector: Collector | None = None
    ) -> None:
        self._traced = traced
        self._wanted = by_call(targets)
        missing = self._wanted.keys() - traced.nodes.keys()
        if missing:
            raise KeyError(f"the graph has no node '{min(missing)}'")
        self._collector = collector or Collector()
        self._collector.pending += sum(map(len, self._wanted.values()))

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """Collected values by the name of their target."""
        return self._collector.values

    @property
    def stopped_at(self) -> str | None:
        """Where the run ended because everything was collected, or None."""
        return self._collector.stopped_at

    def run(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        guard: PassGuard | None = None,
    ) -> None:
        """Run the graph until every target is collected.

        Args:
            module: The traced model or any replica of it.
            args: Positional inputs.
            kwargs: Keyword inputs.
            guard: Checked before each node.

        Raises:
            PassAborted: The guard stopped the run.
            ValueMissingError: A node did not return the element that a target names.
        """
        try:
            for name, value in _run(self._traced, module, (args, kwargs or {}), guard):
                of_calls = self._wanted.get(name, {}) if name is not None else {}
                for wanted in of_calls.values():
                    self._collector.collect(name or "", wanted, {"out": value})
                del value  # otherwise it would outlive its last use by one node
        except StopForward:
            return


def record_nodes(
    module: nn.Module,
    traced: TracedGraph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    is_symbolic: bool = True,
    guard: PassGuard | None = None,
) -> dict[str, ModuleRecord]:
    """Run the graph, symbolic runs twice, and return the record of each node, in execution order.

    There is one record per node: its path is the node's name, its type "node", and it has one call
    without inputs. See `record_calls` for overwritten values. Record the pass itself first: inputs
    that the model rejects look here like a graph that does not fit.

    Args:
        module: The model, on the meta device when symbolic.
        traced: Its graph.
        args: Positional inputs.
        kwargs: Keyword inputs.
        is_symbolic: Whether module and inputs are on the meta device. When not, every value counts
            as overwritten.
        guard: Checked before each node.

    Raises:
        ServiceError: `NOT_TRACEABLE`, the graph does not represent the model for these inputs.
    """
    watch = WriteWatch() if is_symbolic else None
    recorder = Recorder(watch)
    run = partial(_run, traced, module, (args, kwargs or {}), guard, is_symbolic=is_symbolic)
    try:
        with ExitStack() as contexts, torch.no_grad():
            if watch is not None:
                contexts.enter_context(watch)
            for name, value in run():
                if name is not None:
                    recorder.enter(name, CallPorts(UNNAMED, (), {}))
                    recorder.leave(name, value)
                del value
            if watch is not None:
                for _ in run():
                    pass
                recorder.settle_overwrites(watch)
    except (torch.OutOfMemoryError, MemoryError):  # not the graph's fault
        raise
    except Exception as error:
        raise not_traceable(f"its graph does not run on these inputs ({first_line(error)})") from error
    return {name: ModuleRecord(name, "node", calls) for name, calls in recorder.calls.items()}


class _Runner(fx.Interpreter):
    """Runs single nodes, given the inputs by name and the constants of the trace."""

    def __init__(
        self, module: nn.Module, traced: TracedGraph, inputs: Mapping[str, Any], is_symbolic: bool
    ) -> None:
        super().__init__(module, graph=traced.graph)
        self._constants, self._inputs, self._is_symbolic = traced.constants, inputs, is_symbolic

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a node's arguments in fresh lists and dicts, as the eager code would make them.

        The graph's own are immutable, and some functions change theirs (video Swin's attention).
        """
        args: tuple[Any, ...] = self._own(n.args)
        kwargs: dict[str, Any] = self._own(n.kwargs)
        return args, kwargs

    def _own(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.env[value]
        if isinstance(value, list):
            return [self._own(item) for item in value]
        if isinstance(value, dict):
            return {key: self._own(item) for key, item in value.items()}
        if isinstance(value, tuple):
            items = map(self._own, value)
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, slice):
            return slice(self._own(value.start), self._own(value.stop), self._own(value.step))
        return value

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return an input of the model."""
        return self._inputs[target.lstrip("*")]

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a parameter, a buffer or a constant."""
        if target not in self._constants:
            return super().get_attr(target, args, kwargs)
        constant = self._constants[target]
        is_moved = self._is_symbolic and isinstance(constant, torch.Tensor)
        return constant.to("meta") if is_moved else constant


def _run(
    traced: TracedGraph,
    module: nn.Module,
    arguments: tuple[Sequence[Any], Mapping[str, Any]],
    guard: PassGuard | None,
    *,
    is_symbolic: bool = False,
) -> Iterator[tuple[str | None, Any]]:
    """Yield each node's name, None for nodes without one, and its value; free values after use."""
    bound = inspect.signature(module.forward).bind(*arguments[0], **arguments[1])
    bound.apply_defaults()
    runner = _Runner(module, traced, bound.arguments, is_symbolic)
    runner.env = {}
    names = {node: name for name, node in traced.nodes.items()}
    for node in traced.graph.nodes:
        if guard is not None:
            guard.check()
        value = runner.run_node(node)
        if node.users:
            runner.env[node] = value
        yield names.get(node), value
        del value
        for used in runner.user_to_last_uses.get(node, ()):
            del runner.env[used]
