"""Combined session: taps, edits and gradients of one pass, in one context.

    with operate(replica, Surgery(before=edits), targets, collector) as gradients:
        replica(batch)

Hooks run in the order in which they are registered, so at each place edits come first, then gradients, then
taps, then the edits after taps. Around them all stands what in-place modules write: see `ModuleWrites`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from trocar_server.surgery.guard import PassGuard
from trocar_server.surgery.sessions.call_writes import ModuleWrites
from trocar_server.surgery.sessions.editing import EditSession, EditTarget, in_place_calls
from trocar_server.surgery.sessions.gradient_sites import GradientPoint
from trocar_server.surgery.sessions.gradients import GradientSession
from trocar_server.surgery.sessions.taps import Collector, TapGroups, TapSession, Target


@dataclass(frozen=True)
class Surgery:
    """The edits and gradient actions of one pass.

    Attributes:
        before: Edits that taps see.
        after: Edits that taps at the same value do not see.
        points: Actions on gradients.
        anchors: Values with respect to which the objective itself takes gradients.
        inner: Values of this pass that swaps use elsewhere in it, by their own name.
        found: Values of other passes that swaps use, by key.

    Edits of functions are in `before` and `after`, too; the function session applies them.
    """

    before: tuple[EditTarget, ...] = ()
    after: tuple[EditTarget, ...] = ()
    points: tuple[GradientPoint, ...] = ()
    anchors: tuple[Target, ...] = ()
    inner: tuple[Target, ...] = ()
    found: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def of_kind(self, kind: str) -> tuple[list[EditTarget], list[EditTarget]]:
        """Return the edits of one kind of target: those before taps and those after."""
        before = [entry for entry in self.before if entry.target.kind == kind]
        return before, [entry for entry in self.after if entry.target.kind == kind]

    @property
    def is_nothing(self) -> bool:
        """Whether a pass only collects values."""
        return not (self.before or self.after or self.points or self.anchors or self.inner)

    @property
    def paths(self) -> frozenset[str]:
        """The paths of the modules to which an edit or an action on gradients belongs."""
        edited = [entry.target for entry in (*self.before, *self.after)]
        places = (*edited, *(point.target for point in self.points), *self.anchors)
        return frozenset(target.path for target in places if target.kind == "module")

    @property
    def has_gradients(self) -> bool:
        """Whether there is a backward pass."""
        return bool(self.points or self.anchors)


@contextmanager
def operate(
    model: nn.Module,
    surgery: Surgery,
    targets: Sequence[Target] | TapGroups,
    collector: Collector,
    guard: PassGuard | None = None,
) -> Iterator[GradientSession | None]:
    """Tap and change one pass of a model inside the context; every hook is removed afterwards.

    Args:
        model: A replica, leased by the caller.
        surgery: The edits and gradient actions.
        targets: The values to collect: of modules, and parameters.
        collector: Receives them.
        guard: Checked during the backward pass.

    Yields:
        The gradient session, or None where no gradients are requested.
    """
    result: dict[str, torch.Tensor] = dict(surgery.found)
    gradients: GradientSession | None = None
    before, after = surgery.of_kind("module")
    writes = ModuleWrites(model, in_place_calls((*before, *after)), collector)
    with ExitStack() as contexts:
        writes.open_first(contexts)
        if before:
            contexts.enter_context(EditSession(model, before, result, collector))
        if surgery.has_gradients:
            gradients = GradientSession(model, surgery.points, surgery.anchors, guard, collector)
            contexts.enter_context(gradients)
        if surgery.inner:
            inner = Collector(result, ends_pass=False, beside=collector)
            contexts.enter_context(TapSession(model, surgery.inner, inner))
        contexts.enter_context(TapSession(model, targets, collector))
        if after:
            contexts.enter_context(EditSession(model, after, result, collector))
        writes.open_last(contexts)
        yield gradients
