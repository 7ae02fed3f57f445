"""Surgery plan: a plan's edits and objective, resolved for inputs of one signature."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.collecting import CallCounts
from trocar_server.engine.execute.scoring import Scoring, objective_value
from trocar_server.engine.request.objective import Objective
from trocar_server.engine.request.plan import EditRequest
from trocar_server.engine.resolve.call_counts import calls_of, uncertain
from trocar_server.engine.resolve.differentiable import check_float
from trocar_server.engine.resolve.edit_resolution import Expansions, PlannedEdit, SwapValue, plan_edits
from trocar_server.errors import ServiceError
from trocar_server.surgery import (
    EditTarget,
    GradientPoint,
    Recording,
    Selector,
    Skips,
    Surgery,
    Target,
    parse_selector,
    resolve,
)
from trocar_server.surgery.resolution.values import Value
from trocar_server.tensors.edits import Skip

Sources = Mapping[str, Recording | None]
"""Recordings of the passes on other inputs, by name; None where not known yet."""


@dataclass(frozen=True)
class SurgeryPlan:
    """Edits and objective of one request, resolved.

    Attributes:
        edits: The edited values.
        expansions: The names that each edit's selector expanded to.
        objective: The number whose gradients are taken.
        scored: The values that the objective is computed from, in the order of its selectors.
        anchors: The values of its penalties.
        source_calls: By source, the number of calls in its recorded pass, where the values that swaps take
            depend on it and other data may change it.
    """

    edits: tuple[PlannedEdit, ...] = ()
    expansions: Expansions = ()
    objective: Objective | None = None
    scored: tuple[Value, ...] = ()
    anchors: tuple[Value, ...] = ()
    source_calls: Mapping[str, CallCounts] = field(default_factory=dict, compare=False)
    skips: Skips | None = field(default=None, compare=False)
    """The calls that do not run, because an enclosing module is skipped; None for none."""

    def actual(self, target: Target) -> Target:
        """Return a target under its call in the pass with skips.

        Raises:
            ServiceError: `MODULE_NOT_CALLED`, it is inside a skipped module.
        """
        return target if self.skips is None else self.skips.actual(target)

    @property
    def is_nothing(self) -> bool:
        """Whether there are no edits and no objective."""
        return not self.edits and self.objective is None

    @cached_property
    def scored_targets(self) -> tuple[Target, ...]:
        """The values that the objective is computed from, under separate names."""
        return tuple(
            replace(self.actual(target), name=f"objective {index}: {target.name}")
            for index, (target, _) in enumerate(self.scored)
        )

    @property
    def selectors(self) -> Iterable[Selector]:
        """The selectors of all that this pass is used for: edits, values that swaps take, the objective."""
        for entry in self.edits:
            yield entry.request.selector
            if entry.swap and not entry.swap.source:
                yield entry.swap.selector
            if entry.gate and entry.gate[0]:
                yield parse_selector(entry.gate[0].name)
        if self.objective is not None:
            yield from self.objective.selectors
            yield from (penalty.selector for penalty in self.objective.penalties)

    def targets(self) -> Iterable[Target]:
        """Return every target used in the forward pass: edits, values that swaps take, the objective."""
        yield from (entry.target for entry in self.edits)
        yield from (entry.swap.target for entry in self.edits if entry.swap and not entry.swap.source)
        yield from (entry.gate[0] for entry in self.edits if entry.gate and entry.gate[0])
        yield from (target for target, _ in (*self.scored, *self.anchors))

    def swaps_from(self, source: str) -> list[SwapValue]:
        """Return the values that swaps take from the pass on other inputs, each once."""
        swaps = {entry.swap.key: entry.swap for entry in self.edits if entry.swap}
        return [swap for swap in swaps.values() if swap.source == source]

    @property
    def due_gradients(self) -> tuple[frozenset[str], ...]:
        """The names of the edited gradients, a set for each edit."""
        of_edits: dict[int, set[str]] = {}
        for entry in self.edits:
            if entry.target.is_gradient:
                of_edits.setdefault(entry.position, set()).add(entry.target.name)
        return tuple(map(frozenset, of_edits.values()))

    @property
    def extra_bytes(self) -> int:
        """The peak bytes of edits: one at a time, except parameters and swaps, which add up."""
        kept = [e.leaf.byte_count for e in self.edits if e.swap or e.gate or e.target.parameter is not None]
        return sum(kept) + max((entry.byte_count for entry in self.edits), default=0)

    def scoring(self, labels: Sequence[torch.Tensor]) -> Scoring | None:
        """Return the objective with its labels and value names; None without an objective."""
        if self.objective is None:
            return None
        names = tuple(target.name for target, _ in self.anchors)
        return Scoring(self.objective, self.scored_targets, names, tuple(labels))

    def bound(
        self,
        gradients: Sequence[Target],
        operands: Sequence[Sequence[torch.Tensor]],
        outcome: Mapping[str, torch.Tensor],
    ) -> Surgery:
        """Return the surgery of one pass.

        Args:
            gradients: The gradients to collect.
            operands: The tensors of each edit request, by its position.
            outcome: Values for swaps from other passes.
        """
        forward = [entry for entry in self.edits if not entry.target.is_gradient]
        backward = [entry for entry in self.edits if entry.target.is_gradient]
        inner = {e.swap.key: e.swap.target for e in forward if e.swap and not e.swap.source}
        inner |= {gate.name: gate for gate in (e.gate[0] for e in forward if e.gate) if gate is not None}
        collected = [GradientPoint(self.actual(target)) for target in gradients]
        edited = [
            GradientPoint(self.actual(e.target), self._edit_target(e, operands), e.request.is_after_taps)
            for e in backward
        ]
        return Surgery(
            before=tuple(self._edit_target(e, operands) for e in forward if not e.request.is_after_taps),
            after=tuple(self._edit_target(e, operands) for e in forward if e.request.is_after_taps),
            points=(*collected, *edited),
            anchors=tuple(self.actual(target) for target, _ in self.anchors),
            inner=tuple(replace(self.actual(target), clone=True) for target in inner.values()),
            found=outcome,
        )

    def _edit_target(self, entry: PlannedEdit, operands: Sequence[Sequence[torch.Tensor]]) -> EditTarget:
        return EditTarget(
            self.actual(entry.target),
            entry.request.edit,
            tuple(operands[entry.position]) if operands else (),
            entry.call_input,
            entry.swap.key if entry.swap else "",
            entry.position,
            is_in_place=entry.written_bytes > 0,
            gate=entry.gate[1] if entry.gate else None,
        )


NO_SURGERY = SurgeryPlan()


def plan_surgery(
    edits: Sequence[EditRequest], objective: Objective | None, recording: Recording, sources: Sources
) -> SurgeryPlan:
    """Resolve and check edits and an objective.

    Raises:
        ServiceError: See `plan_edits`; `OBJECTIVE_REJECTED`, `OBJECTIVE_OUT_OF_RANGE`, a selector's error.
    """
    if not edits and objective is None:
        return NO_SURGERY
    planned, expansions = plan_edits(edits, recording, sources)
    skipped = [entry.target for entry in planned if isinstance(entry.request.edit.operation, Skip)]
    skips = Skips(skipped, recording)
    if skipped:
        planned, expansions = _that_happen(planned, expansions, skips)
    scored, anchors = _scored(objective, recording) if objective else ((), ())
    calls = _calls_of_sources(planned, sources)
    surgery_plan = SurgeryPlan(planned, expansions, objective, scored, anchors, calls, skips)
    for target in surgery_plan.targets():
        surgery_plan.actual(target)
    return surgery_plan


def _calls_of_sources(planned: Sequence[PlannedEdit], sources: Sources) -> dict[str, CallCounts]:
    result: dict[str, CallCounts] = {}
    for name, recording in sources.items():
        selectors = [entry.swap.selector for entry in planned if entry.swap and entry.swap.source == name]
        if recording is not None and (doubtful := uncertain(selectors, recording)):
            result[name] = calls_of(doubtful, recording)
    return result


def _that_happen(
    planned: Sequence[PlannedEdit], expansions: Expansions, skips: Skips
) -> tuple[tuple[PlannedEdit, ...], Expansions]:
    """Leave out of patterns the values inside skipped modules.

    Raises:
        ServiceError: `MODULE_NOT_CALLED`, all matches of a pattern are.
    """
    result: list[PlannedEdit] = []
    names: list[tuple[str, tuple[str, ...]]] = []
    for position, (text, _) in enumerate(expansions):
        entries = [entry for entry in planned if entry.position == position]
        happening = [entry for entry in entries if not skips.is_inside(entry.target)]
        if not happening or not entries[0].request.selector.is_plural:
            happening = entries  # refused like any other target
        result += happening
        names.append((text, tuple(entry.target.name for entry in happening)))
    return tuple(result), tuple(names)


def _scored(objective: Objective, recording: Recording) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """Return the values of an objective and the anchors of its penalties, checked without data."""
    scored = tuple(_one_value(selector, recording) for selector in objective.selectors)
    anchors = tuple(_one_value(penalty.selector, recording) for penalty in objective.penalties)
    for target, leaf in anchors:
        check_float(target, leaf)
    empty = [_empty(leaf.shape or (), leaf.dtype or torch.float32) for _, leaf in scored]
    labels = [_empty(spec.shape, spec.dtype) for spec in objective.operands]
    layouts = [target.layout for target, _ in scored]
    objective_value(objective, empty, labels, [target.name for target, _ in anchors], layouts=layouts)
    return scored, anchors


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _one_value(selector: Selector, recording: Recording) -> Value:
    (values,) = resolve([selector], recording)
    ((target, leaf), *more) = values
    if more:
        problem = f"stands for {len(values)} values; name one of them, for example {_as_place(target.name)}"
    elif target.kind != "module" or selector.parameter is not None:
        problem = "is no value of a module, and objectives are made of those"
    else:
        return target, leaf
    raise ServiceError(
        ErrorReason.OBJECTIVE_REJECTED,
        f"objective: '{selector.text}' {problem}",
        selector=selector.text,
    )


def _as_place(name: str) -> str:
    """Return a selector as the argument of an objective in Python."""
    return f"at='{name}'" if '"' in name else f'at="{name}"'


def that_run(values: Sequence[Value], selector: Selector, surgery: SurgeryPlan) -> list[Value]:
    """Return the values that are not inside skipped modules.

    Raises:
        ServiceError: `MODULE_NOT_CALLED`, all are inside, or an exact selector's value is.
    """
    result: list[Value] = []
    problem: ServiceError | None = None
    for value in values:
        try:
            surgery.actual(value[0])
            result.append(value)
        except ServiceError as error:
            problem = error
    if problem is not None and not (result and selector.is_plural):
        raise problem
    return result
