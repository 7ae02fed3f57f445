"""One forward pass, and one backward pass where gradients are wanted: hooks on, run, hooks off, always."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trocar_api.reasons import ErrorReason
from trocar_server.engine.objective import Objective
from trocar_server.engine.scoring import objective_value
from trocar_server.errors import ServiceError
from trocar_server.surgery import (
    Collector,
    FunctionSession,
    GradientSession,
    NodeSession,
    PassGuard,
    StartSession,
    Surgery,
    Target,
    TracedGraph,
    ValueMissingError,
    differentiable,
    graphs_end_here,
    independent,
    operate,
)

Arguments = tuple[Sequence[object], Mapping[str, object]]
"""Positional and keyword arguments of a forward."""


@dataclass(frozen=True)
class Scoring:
    """The objective of one pass, with its labels and the names of its values."""

    objective: Objective
    values: tuple[Target, ...]
    anchors: tuple[str, ...]
    labels: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Work:
    """What one pass does.

    Attributes:
        targets: The values of the forward pass to collect, parameters among them.
        surgery: Edits and gradients.
        scoring: The objective, where gradients are wanted.
        start: Where the pass starts, if not at the arguments, which are then without data.
        graph: The model's traced graph, when nodes of it are wanted: it runs by itself, beside the pass.
        due: The names of the edited values that the pass must come to.
        due_gradients: The names of edited gradients; of each set one must come.
    """

    targets: Sequence[Target]
    surgery: Surgery = field(default_factory=Surgery)
    scoring: Scoring | None = None
    start: StartSession | None = None
    graph: TracedGraph | None = None
    due: frozenset[str] = frozenset()
    due_gradients: tuple[frozenset[str], ...] = ()

    def of_kind(self, kind: str) -> list[Target]:
        """Return the targets of one kind."""
        return [target for target in self.targets if target.kind == kind]


@dataclass(frozen=True)
class Collected:
    """What one pass gave.

    Attributes:
        values: Values and gradients by the name of their target.
        stopped_at: Where it ended because nothing more was wanted, or None.
        objective: The value of the objective, or None.
    """

    values: dict[str, torch.Tensor]
    stopped_at: str | None = None
    objective: float | None = None


def collect(module: nn.Module, arguments: Arguments, work: Work, guard: PassGuard) -> Collected:
    """Run one pass of a replica. Owner thread only, in `inference_mode` where no gradients are wanted.

    Raises:
        StartMixedError: What follows the start needs a value from before it.
        ServiceError: `NOT_DIFFERENTIABLE`, and what is wrong with the objective; `MODULE_NOT_CALLED`, an
            edit's module was not called: the model decides on its data.
        Exception: Whatever the model raises; see `domain_errors`.
    """
    if work.scoring is not None:
        return _with_gradients(module, arguments, work, work.scoring, guard)
    collector = Collector()
    with ExitStack() as contexts:
        contexts.enter_context(guard.watching(module))
        contexts.enter_context(work.start or nullcontext())
        calls = FunctionSession(work.of_kind("fn"), collector, guard, *work.surgery.of_kind("fn"))
        contexts.enter_context(operate(module, work.surgery, work.of_kind("module"), collector))
        contexts.enter_context(calls)
        if collector.is_pending:
            module(*arguments[0], **arguments[1])
    _check_edits(work, collector)
    of_graph = work.of_kind("fx")
    if work.graph is None or not of_graph:
        return Collected(collector.values, collector.stopped_at)
    nodes = NodeSession(work.graph, of_graph)
    with guard.watching(module):
        nodes.run(module, *arguments, guard)
    return Collected({**collector.values, **nodes.values}, collector.stopped_at or nodes.stopped_at)


def _with_gradients(
    module: nn.Module, arguments: Arguments, work: Work, scoring: Scoring, guard: PassGuard
) -> Collected:
    collector = Collector()
    targets = [*work.of_kind("module"), *scoring.values]
    with ExitStack() as contexts:
        contexts.enter_context(graphs_end_here(module))
        contexts.enter_context(torch.enable_grad())
        contexts.enter_context(_kernels(scoring.objective))
        operation = operate(module, work.surgery, targets, collector, guard)
        calls = FunctionSession(work.of_kind("fn"), collector, guard, *work.surgery.of_kind("fn"))
        with guard.watching(module), operation as gradients, calls, differentiable():
            module(*arguments[0], **arguments[1])
        assert gradients is not None  # an objective comes with gradients
        _check_edits(work, collector)
        score = _score(collector.values, scoring, gradients)
        gradients.backward(score)
    for due in work.due_gradients:
        if not due & gradients.edited:
            raise independent(sorted(due))
    names = [target.name for target in work.targets if target.name in collector.values]
    values = {name: collector.values[name].detach() for name in names}
    number = None if score.is_meta else float(score.detach())  # a rehearsal has no numbers
    return Collected({**values, **gradients.values}, collector.stopped_at, number)


def _check_edits(work: Work, collector: Collector) -> None:
    """Refuse the outcome of a pass that did not come to an edit, which would go unnoticed."""
    missing = sorted(work.due - collector.edited)
    if missing:
        raise ServiceError(
            ErrorReason.MODULE_NOT_CALLED,
            f"'{missing[0]}' was not called in this pass, so not edited: the model decides on its data",
            name=missing[0],
        )


def _score(values: Mapping[str, torch.Tensor], scoring: Scoring, gradients: GradientSession) -> torch.Tensor:
    missing = next((target.name for target in scoring.values if target.name not in values), None)
    if missing is not None:
        raise ValueMissingError(missing)
    chosen = [values[target.name] for target in scoring.values]
    return objective_value(scoring.objective, chosen, scoring.labels, scoring.anchors, gradients.gradient)


def _kernels(objective: Objective) -> AbstractContextManager[object]:
    """Fused attention has no second derivative (torch 2.14), so a penalty takes the plain one."""
    if not objective.needs_second_derivative:
        return nullcontext()
    return sdpa_kernel(SDPBackend.MATH)
