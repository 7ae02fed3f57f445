"""Collection: one forward pass, and one backward pass for gradients; hooks are always removed."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trocar_server.engine.execute.scoring import Scoring
from trocar_server.surgery import (
    CallsDifferError,
    Collector,
    FunctionSession,
    NodeSession,
    NoReruns,
    PassGuard,
    StartSession,
    Surgery,
    TapGroups,
    TapSession,
    Target,
    TracedGraph,
    ValueMissingError,
    differentiable,
    differentiable_recurrence,
    graphs_end_here,
    named_arguments,
    operate,
    recurrent_layers,
    without_recomputation,
)

CallCounts = Mapping[tuple[str, str], int]
"""Numbers of calls in a pass, by kind (`module` or `fn`) and path or name."""

Arguments = tuple[Sequence[object], Mapping[str, object]]
"""Positional and keyword arguments of a forward."""


def copied_arguments(arguments: Arguments) -> Arguments:
    """Return arguments with copies of all tensors, for a pass before the last: a model may write to them."""
    positional, keyword = arguments
    return [copied(value) for value in positional], {name: copied(keyword[name]) for name in keyword}


def copied(value: object) -> object:
    """Return an argument with copies of all tensors."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


class EditMissedError(Exception):
    """A pass ended without a call of a value that it was to edit; its argument is the value's name."""


class NoGradientError(Exception):
    """No gradient of a set that was to be edited was computed; its argument is their names."""


@dataclass(frozen=True)
class PassSpec:
    """Specification of one pass: values, edits and objective.

    Attributes:
        targets: The values of the forward pass to collect, parameters among them.
        surgery: Edits and gradients.
        scoring: The objective, where gradients are wanted.
        start: Where the pass starts, if not at the arguments, which then have no data.
        graph: The model's traced graph, when its nodes are wanted: it runs separately, beside the pass.
        due: The names of the edited values that the pass must reach.
        calls: Required number of calls by module or function; the pass then runs to its end.
        due_gradients: The names of edited gradients; one of each set must be computed.
    """

    targets: Sequence[Target]
    surgery: Surgery = field(default_factory=Surgery)
    scoring: Scoring | None = None
    start: StartSession | None = None
    graph: TracedGraph | None = None
    due: frozenset[str] = frozenset()
    due_gradients: tuple[frozenset[str], ...] = ()
    calls: CallCounts = field(default_factory=dict)

    def of_kind(self, kind: str) -> list[Target]:
        """Return the targets of one kind."""
        return [target for target in self.targets if target.kind == kind]

    @cached_property
    def has_functions(self) -> bool:
        """Whether values of functions are collected or edited."""
        edits = (*self.surgery.before, *self.surgery.after)
        return any(target.kind == "fn" for target in (*self.targets, *(edit.target for edit in edits)))

    @cached_property
    def of_modules(self) -> TapGroups:
        """The targets in modules, and parameters."""
        return TapGroups.of(self.of_kind("module"))

    @cached_property
    def collects_only(self) -> bool:
        """Whether the pass is changed in nothing."""
        return self.surgery.is_nothing

    @cached_property
    def of_graph(self) -> list[Target]:
        """The targets in the traced graph."""
        return self.of_kind("fx")


@dataclass(frozen=True)
class Collected:
    """Values collected in one pass.

    Attributes:
        values: Values and gradients by the name of their target.
        stopped_at: Where it ended because nothing more was wanted, or None.
        objective: The value of the objective, or None.
        is_stop_known: Whether `stopped_at` tells it; a compiled pass does not know.
        edited: The names of the values that were edited.
        opened: For each edit with a gate: where it was open, (samples, tokens).
        edited_shapes: The shapes of the values that were edited in the forward pass, by name.
    """

    values: dict[str, torch.Tensor]
    stopped_at: str | None = None
    objective: float | None = None
    is_stop_known: bool = True
    edited: AbstractSet[str] = frozenset()
    opened: Mapping[int, torch.Tensor] = field(default_factory=dict)
    edited_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def collect(
    module: nn.Module,
    arguments: Arguments,
    pass_spec: PassSpec,
    guard: PassGuard,
    graph_module: nn.Module | None = None,
) -> Collected:
    """Run one pass of a replica. Owner thread only, in `inference_mode` where no gradients are wanted.

    Args:
        module: The replica's tree.
        arguments: Positional and keyword arguments of the forward.
        pass_spec: Values, edits and objective.
        guard: Aborts the pass.
        graph_module: The tree for the traced graph, where a pass changes its own.

    Raises:
        StartMixedError: A module after the start needs a value from before it.
        CallsDifferError: The calls of a module or function are not as many as `PassSpec.calls` requires.
        EditMissedError: The pass did not reach an edit: the model's control flow depends on its data.
        NoGradientError: None of the gradients that an edit is for was computed.
        ServiceError: An error of the objective.
        Exception: Any error of the model; see `domain_errors`.
    """
    if pass_spec.scoring is not None:
        return _with_gradients(module, arguments, pass_spec, pass_spec.scoring, guard)
    collector = Collector(ends_pass=not pass_spec.calls)
    with ExitStack() as contexts:
        if pass_spec.calls:
            contexts.enter_context(_counting(module, pass_spec.calls))
        contexts.enter_context(guard.watching(module))
        if pass_spec.start is not None:
            contexts.enter_context(pass_spec.start)
        if pass_spec.has_functions:
            calls = FunctionSession(
                pass_spec.of_kind("fn"), collector, guard, *pass_spec.surgery.of_kind("fn")
            )
            contexts.enter_context(operate(module, pass_spec.surgery, pass_spec.of_modules, collector))
            contexts.enter_context(calls)
            contexts.enter_context(_counting_functions(calls, pass_spec.calls))
        elif pass_spec.collects_only:
            contexts.enter_context(TapSession(module, pass_spec.of_modules, collector))
        else:
            contexts.enter_context(operate(module, pass_spec.surgery, pass_spec.of_modules, collector))
        of_graph = () if pass_spec.graph is None else pass_spec.of_graph
        if collector.pending:
            given = copied_arguments(arguments) if of_graph else arguments  # the graph runs on them, too
            module(*given[0], **given[1])
    if pass_spec.due:
        _check_edits(pass_spec, collector)
    if pass_spec.graph is None or not of_graph:
        return Collected(
            collector.values,
            collector.stopped_at,
            edited=collector.edited,
            opened=collector.opened,
            edited_shapes=collector.edited_shapes,
        )
    nodes = NodeSession(pass_spec.graph, of_graph)
    graph_module = module if graph_module is None else graph_module
    with guard.watching(graph_module):
        nodes.run(graph_module, *arguments, guard)
    return Collected(
        {**collector.values, **nodes.values},
        collector.stopped_at or nodes.stopped_at,
        edited=collector.edited,
    )


def _with_gradients(
    module: nn.Module, arguments: Arguments, pass_spec: PassSpec, scoring: Scoring, guard: PassGuard
) -> Collected:
    collector = Collector(ends_pass=not pass_spec.calls)
    targets = [*pass_spec.of_kind("module"), *scoring.values]
    with ExitStack() as contexts:
        contexts.enter_context(graphs_end_here(module))
        contexts.enter_context(torch.enable_grad())
        contexts.enter_context(_kernels(scoring))
        contexts.enter_context(differentiable_recurrence(recurrent_layers(module)))
        operation = operate(module, pass_spec.surgery, targets, collector, guard)
        calls = FunctionSession(pass_spec.of_kind("fn"), collector, guard, *pass_spec.surgery.of_kind("fn"))
        counting = _counting(module, pass_spec.calls)
        of_functions = _counting_functions(calls, pass_spec.calls)
        with (
            counting,
            guard.watching(module),
            operation as gradients,
            calls,
            of_functions,
            differentiable(),
            without_recomputation(),
        ):
            module(*arguments[0], **arguments[1])
        assert gradients is not None  # an objective comes with gradients
        _check_edits(pass_spec, collector)
        with NoReruns(module, pass_spec.surgery.paths):
            given = named_arguments(module, *arguments)
            score = scoring.number(collector.values, gradients.gradient, given)
            gradients.backward(score)
    for due in pass_spec.due_gradients:
        if not due & gradients.edited:
            raise NoGradientError(sorted(due))
    names = [target.name for target in pass_spec.targets if target.name in collector.values]
    values = {name: collector.values[name].detach() for name in names}
    number = None if score.is_meta else float(score.detach())  # a meta pass has no numbers
    return Collected({**values, **gradients.values}, collector.stopped_at, number)


@contextmanager
def _counting_functions(session: FunctionSession, expected: CallCounts) -> Iterator[None]:
    """Compare the number of calls of functions inside the context with the expected ones.

    Raises:
        CallsDifferError: They differ, and the context ended without another error.
    """
    yield
    counts = session.call_counts
    if counts is None:
        return
    for (kind, name), count in expected.items():
        if kind == "fn" and counts[name] != count:
            raise CallsDifferError(f"fn:{name}")


@contextmanager
def _counting(module: nn.Module, expected: CallCounts) -> Iterator[None]:
    """Compare the number of calls of modules inside the context with the expected ones.

    Raises:
        CallsDifferError: They differ, and the context ended without another error.
    """
    counts: Counter[str] = Counter()
    with ExitStack() as hooks:
        for kind, path in expected:
            if kind == "module":
                handle = module.get_submodule(path).register_forward_pre_hook(partial(_count, counts, path))
                hooks.callback(handle.remove)
        try:
            yield
        except ValueMissingError as missing:  # a swap takes it from a call that this data does not make
            raise CallsDifferError(missing.args[0].partition("@")[0]) from missing
    for (kind, path), count in expected.items():
        if kind == "module" and counts[path] != count:
            raise CallsDifferError(path)


def _count(counts: Counter[str], path: str, *_: object) -> None:
    counts[path] += 1


def _check_edits(pass_spec: PassSpec, collector: Collector) -> None:
    """Refuse the result of a pass that did not reach an edit; the caller would not notice."""
    missing = sorted(pass_spec.due - collector.edited)
    if missing:
        raise EditMissedError(missing[0])


def _kernels(scoring: Scoring) -> AbstractContextManager[object]:
    """Fused attention has no second derivative (torch 2.14), so a penalty uses the math kernel."""
    if not scoring.objective.needs_second_derivative:
        return nullcontext()
    return sdpa_kernel(SDPBackend.MATH)
