"""Reach of a recorded pass: the edits that it executes before it stops.

A pass ends with the last wanted value, so a later edit would change nothing. The same holds for
a parameter that nothing has read by then, and for a gradient from which no wanted gradient is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trocar_api.reasons import ErrorReason
from trocar_server.engine.resolve.edit_resolution import PlannedEdit
from trocar_server.engine.resolve.surgery_plan import SurgeryPlan
from trocar_server.errors import ServiceError
from trocar_server.surgery import Recording, Target, place

_Place = tuple[int, ...]


def reached(surgery: SurgeryPlan, wanted: Sequence[Target], recording: Recording) -> SurgeryPlan:
    """Return a plan with the edits that the pass reaches; of a selector of several values, only those.

    Args:
        surgery: Edits and objective.
        wanted: The collected values, gradients and parameters included.
        recording: Of the pass.

    Raises:
        ServiceError: `EDIT_NOT_REACHED`, the pass reaches no value of one of the edits.
    """
    if surgery.is_nothing:
        return surgery
    if any(target.kind == "fx" for target in wanted):
        raise _refusal(
            "graph nodes are collected by a run of the traced graph, which neither edits nor an objective "
            "change; tap modules or functions (`fn:`) instead"
        )
    reach = _Reach(surgery, wanted, recording)
    result: list[PlannedEdit] = []
    names: list[tuple[str, tuple[str, ...]]] = []
    for position, (text, _) in enumerate(surgery.expansions):
        entries = [entry for entry in surgery.edits if entry.position == position]
        coming = [entry for entry in entries if reach.comes_to(entry)]
        if entries and not coming:
            raise reach.refusal(entries[0])
        result += coming
        names.append((text, tuple(entry.target.name for entry in coming)))
    return replace(surgery, edits=tuple(result), expansions=tuple(names))


def edits_due(surgery: SurgeryPlan) -> frozenset[str]:
    """Return the names of the edited values of the forward pass: it must reach each, or is refused."""
    forward = (entry.target for entry in surgery.edits if not entry.target.is_gradient)
    return frozenset(target.name for target in forward if target.parameter is None)


@dataclass(frozen=True)
class _Reach:
    surgery: SurgeryPlan
    wanted: Sequence[Target]
    recording: Recording

    @property
    def _ends(self) -> list[Target]:
        forward = [t for t in self.wanted if not t.is_gradient and t.parameter is None]
        return [*forward, *(target for target, _ in self.surgery.scored)]

    @property
    def _gradients(self) -> list[Target]:
        wanted = [target for target in self.wanted if target.is_gradient]
        return [*wanted, *(target for target, _ in self.surgery.anchors)]

    def comes_to(self, entry: PlannedEdit) -> bool:
        if entry.target.is_gradient:
            return any(self._is_upstream(target, entry) for target in self._gradients)
        if entry.target.parameter is not None and any(self._is_same(entry.target, t) for t in self.wanted):
            return True
        end = max((place(target, self.recording) for target in self._ends), default=None)
        if end is None:
            return False
        here = self._use(entry.target)
        return here < end or (here == end and not entry.request.is_after_taps)

    def refusal(self, entry: PlannedEdit) -> ServiceError:
        name, ends = entry.target.name, self._ends
        if entry.target.is_gradient:
            problem = (
                "no gradient that is wanted is computed from it: gradients go from the objective to the "
                "input; ask for one nearer to the input, or for that one itself"
            )
            return _refusal(f"the edit of '{name}' would change nothing: {problem}", name)
        if not ends:
            problem = "only parameters are requested, so no pass runs; tap a value of the pass as well"
            return _refusal(f"the edit of '{name}' would change nothing: {problem}", name)
        last = max(ends, key=lambda target: place(target, self.recording)).name
        if entry.target.parameter is not None and self._read_at(entry.target) == -1:
            problem = "no operation of the pass reads it; leave the edit out, or edit the value that is used"
        else:
            problem = (
                f"the pass ends at '{last}', the last requested value; tap a value after the edit as well"
            )
        return _refusal(f"the edit of '{name}' would change nothing: {problem}", name, tap=last)

    def _is_upstream(self, wanted: Target, entry: PlannedEdit) -> bool:
        """Whether a gradient is computed from an edited one, or is the edited one."""
        edited = entry.target
        if edited.parameter is not None:
            return self._is_same(edited, wanted) or self._may_be_tied(edited, wanted)
        first, here = self._use(wanted), place(edited, self.recording)
        return first < here or (first == here and not entry.request.is_after_taps)

    def _use(self, target: Target) -> _Place:
        """Return the place of a value, or of a parameter's first use as far as that is known."""
        if target.parameter is None:
            return place(target, self.recording)
        read_at = self._read_at(target)
        if read_at is None:
            places = self.recording.second_names.places((target.path, target.parameter))
            calls = [call for path, _ in places for call in self.recording.modules[path].calls]
            return min((call.started for call in calls), default=0), 0, 1
        never = 1 << 62
        return (never if read_at < 0 else read_at), 0, 1

    def _read_at(self, target: Target) -> int | None:
        leaf = self.recording.modules[target.path].parameters.get(target.parameter or "")
        return None if leaf is None else leaf.read_at

    def _is_same(self, edited: Target, wanted: Target) -> bool:
        """Whether two targets of parameters, or of their gradients, are one tensor."""
        if edited.is_gradient != wanted.is_gradient or wanted.parameter is None:
            return False
        places = self.recording.second_names.places((edited.path, edited.parameter or ""))
        return (wanted.path, wanted.parameter) in places

    def _may_be_tied(self, edited: Target, wanted: Target) -> bool:
        """Whether two names may refer to one tensor: it is then read at the same step."""
        if wanted.parameter is None:
            return False
        leaves = [self.recording.modules[t.path].parameters.get(t.parameter or "") for t in (edited, wanted)]
        if leaves[0] is None or leaves[1] is None:
            return True
        return (leaves[0].read_at, leaves[0].shape) == (leaves[1].read_at, leaves[1].shape)


def _refusal(message: str, name: str = "", **details: str) -> ServiceError:
    facts = {"name": name, **details} if name else details
    return ServiceError(ErrorReason.EDIT_NOT_REACHED, message, **facts)
