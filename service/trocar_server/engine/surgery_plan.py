"""What a plan's edits and objective became for inputs of one form, and what a pass needs of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.edits import Skip
from trocar_server.engine.collecting import Scoring
from trocar_server.engine.differentiable import check_float
from trocar_server.engine.edits import Expansions, PlannedEdit, plan_edits
from trocar_server.engine.objective import GradientPenalty, Objective
from trocar_server.engine.plan import EditRequest
from trocar_server.engine.scoring import objective_value
from trocar_server.errors import ServiceError
from trocar_server.surgery import (
    EditTarget,
    GradientPoint,
    Recording,
    Selector,
    Skips,
    Surgery,
    Target,
    moment,
    resolve,
)
from trocar_server.surgery.values import Value

Sources = Mapping[str, Recording | None]
"""Recordings of the passes on other inputs, by name; None where one is not known yet."""


@dataclass(frozen=True)
class SurgeryPlan:
    """Edits and objective of one request, resolved.

    Attributes:
        edits: The values that are changed.
        expansions: What each edit's selector became.
        objective: What gradients are taken of.
        scored: The values that the objective is made of, in the order of its selectors.
        anchors: The values of its penalties.
    """

    edits: tuple[PlannedEdit, ...] = ()
    expansions: Expansions = ()
    objective: Objective | None = None
    scored: tuple[Value, ...] = ()
    anchors: tuple[Value, ...] = ()
    actual: Callable[[Target], Target] = field(default=lambda target: target, compare=False)
    """Returns a target as it is called in the pass with skips; raises where it is inside of one."""

    @property
    def is_nothing(self) -> bool:
        """Whether the pass is left as it is."""
        return not self.edits and self.objective is None

    @cached_property
    def scored_targets(self) -> tuple[Target, ...]:
        """The values that the objective is made of, under names of their own."""
        return tuple(
            replace(self.actual(target), name=f"objective {index}: {target.name}")
            for index, (target, _) in enumerate(self.scored)
        )

    def targets(self) -> Iterable[Target]:
        """Return every place of the forward pass that is touched: edits, what swaps take, the objective."""
        yield from (entry.target for entry in self.edits)
        yield from (entry.swap.target for entry in self.edits if entry.swap and not entry.swap.source)
        yield from (target for target, _ in (*self.scored, *self.anchors))

    def source_targets(self, source: str) -> list[Target]:
        """Return the values that swaps take from the pass on other inputs, each named by its key."""
        swaps = {entry.swap.key: entry.swap for entry in self.edits if entry.swap}
        return [replace(s.target, name=key, clone=True) for key, s in swaps.items() if s.source == source]

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
        """The most bytes that edits hold at once: one at a time, but of parameters and swaps all."""
        kept = [e.leaf.byte_count for e in self.edits if e.swap or e.target.parameter is not None]
        return sum(kept) + max((entry.byte_count for entry in self.edits), default=0)

    def scoring(self, labels: Sequence[torch.Tensor]) -> Scoring | None:
        """Return what the objective's number is made of; None without an objective."""
        if self.objective is None:
            return None
        names = tuple(target.name for target, _ in self.anchors)
        return Scoring(self.objective, self.scored_targets, names, tuple(labels))

    def bound(
        self,
        gradients: Sequence[Target],
        constants: Sequence[Sequence[torch.Tensor]],
        found: Mapping[str, torch.Tensor],
    ) -> Surgery:
        """Return what one pass is operated on with.

        Args:
            gradients: What to collect of gradients.
            constants: The tensors of each edit request, by its position.
            found: Values for swaps from other passes.
        """
        forward = [entry for entry in self.edits if not entry.target.is_gradient]
        backward = [entry for entry in self.edits if entry.target.is_gradient]
        inner = {e.swap.key: e.swap.target for e in forward if e.swap and not e.swap.source}
        collected = [GradientPoint(self.actual(target)) for target in gradients]
        edited = [
            GradientPoint(self.actual(e.target), self._edit_target(e, constants), e.request.is_after_taps)
            for e in backward
        ]
        return Surgery(
            before=tuple(self._edit_target(e, constants) for e in forward if not e.request.is_after_taps),
            after=tuple(self._edit_target(e, constants) for e in forward if e.request.is_after_taps),
            points=(*collected, *edited),
            anchors=tuple(self.actual(target) for target, _ in self.anchors),
            inner=tuple(replace(self.actual(target), clone=True) for target in inner.values()),
            found=found,
        )

    def _edit_target(self, entry: PlannedEdit, constants: Sequence[Sequence[torch.Tensor]]) -> EditTarget:
        return EditTarget(
            self.actual(entry.target),
            entry.request.edit,
            tuple(constants[entry.position]) if constants else (),
            entry.call_input,
            entry.swap.key if entry.swap else "",
            entry.position,
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
    found = SurgeryPlan(planned, expansions, objective, scored, anchors, skips.actual)
    for target in found.targets():
        found.actual(target)
    return found


def edits_due(surgery: SurgeryPlan, wanted: Sequence[Target], recording: Recording) -> frozenset[str]:
    """Return the names of the edited values that a pass comes to while it collects what is wanted.

    Empty where functions are wanted, whose clock says nothing of modules.
    """
    forward = [target for target in wanted if not target.is_gradient and target.parameter is None]
    ends = [*forward, *(target for target, _ in surgery.scored)]
    if not ends or any(target.kind != "module" for target in ends):
        return frozenset()
    end = max(moment(target, recording) for target in ends)
    return frozenset(
        entry.target.name
        for entry in surgery.edits
        if entry.target.kind == "module"
        and entry.target.parameter is None
        and moment(entry.target, recording) + entry.request.is_after_taps <= end  # taps end the pass
    )


def _that_happen(
    planned: Sequence[PlannedEdit], expansions: Expansions, skips: Skips
) -> tuple[tuple[PlannedEdit, ...], Expansions]:
    """Leave out of patterns what is inside of skipped modules.

    Raises:
        ServiceError: `MODULE_NOT_CALLED`, all of a pattern is.
    """
    found: list[PlannedEdit] = []
    names: list[tuple[str, tuple[str, ...]]] = []
    for position, (text, _) in enumerate(expansions):
        entries = [entry for entry in planned if entry.position == position]
        happening = [entry for entry in entries if not skips.is_inside(entry.target)]
        if not happening or not entries[0].request.selector.is_plural:
            happening = entries  # refused like any other target
        found += happening
        names.append((text, tuple(entry.target.name for entry in happening)))
    return tuple(found), tuple(names)


def _scored(objective: Objective, recording: Recording) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """Return the values of an objective and the anchors of its penalties, checked without data."""
    scored = tuple(_one_value(selector, recording) for selector in objective.selectors)
    penalties = [term.score for term in objective.terms if isinstance(term.score, GradientPenalty)]
    anchors = tuple(_one_value(penalty.selector, recording) for penalty in penalties)
    for target, leaf in anchors:
        check_float(target, leaf)
    empty = [_empty(leaf.shape or (), leaf.dtype or torch.float32) for _, leaf in scored]
    labels = [_empty(spec.shape, spec.dtype) for spec in objective.constants]
    objective_value(objective, empty, labels, [target.name for target, _ in anchors])
    return scored, anchors


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _one_value(selector: Selector, recording: Recording) -> Value:
    (values,) = resolve([selector], recording)
    ((target, leaf), *more) = values
    if more or target.kind != "module" or selector.parameter is not None:
        raise ServiceError(
            ErrorReason.OBJECTIVE_REJECTED,
            f"objective: '{selector.text}' stands for {len(values)} values, for example '{target.name}'; it "
            "is made of single values of modules",
            selector=selector.text,
        )
    return target, leaf


def that_run(values: Sequence[Value], selector: Selector, surgery: SurgeryPlan) -> list[Value]:
    """Return the values that are not inside of what is skipped.

    Raises:
        ServiceError: `MODULE_NOT_CALLED`, all are, or an exact selector names one that is.
    """
    found: list[Value] = []
    problem: ServiceError | None = None
    for value in values:
        try:
            surgery.actual(value[0])
            found.append(value)
        except ServiceError as error:
            problem = error
    if problem is not None and not (found and selector.is_plural):
        raise problem
    return found
