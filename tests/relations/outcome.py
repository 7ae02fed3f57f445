"""The outcome of one case of a relation, and when a refusal is an answer."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import trocar
from tests.relations.families import FAMILIES
from tests.relations.fields import fields_of
from tests.relations.replies import Comparison, Parts, same_bits
from tests.relations.request import Request, Wanted

TRUE_REFUSALS = frozenset(
    (
        "EDIT_SHAPE_MISMATCH",
        "EDIT_NOT_POSSIBLE",
        "EDIT_NOT_REACHED",
        "EDIT_DTYPE_REJECTED",
        "NOT_DIFFERENTIABLE",
        "OBJECTIVE_REJECTED",
        "OBJECTIVE_OUT_OF_RANGE",
        "REDUCTION_REJECTED",
        "DUPLICATE_NAME",
        "NOT_A_TENSOR",
    )
)
"""Why a request of the generator may be refused: it does not fit the value that it names."""


@dataclass
class Outcome:
    """What came of one case.

    Attributes:
        relation: Its name.
        family: Its name.
        comparison: What was compared.
        refused: Why both ways were refused; empty if they were not.
        request: What was asked; None if it is no request of the generator.
        inputs: With these inputs.
    """

    relation: str
    family: str
    comparison: Comparison = field(default_factory=Comparison)
    refused: str = ""
    request: Request | None = None
    inputs: Any = None

    def tapped(self, reply: Any) -> None:
        """Note where the feature maps of a reply were tapped."""
        if self.request is not None:
            self.comparison.places |= {
                name: wanted.place for name, wanted in named(self.request, reply).items()
            }

    @property
    def fields(self) -> frozenset[str]:
        """The fields of the request, if its reply had finite values that are not all the same."""
        if self.request is None or self.refused or not self.comparison.solid:
            return frozenset()
        solid = tuple(wanted for wanted in self.request.wanted if self._is_solid(wanted))
        return fields_of(self.request.with_taps(solid).message(FAMILIES[self.family], self.inputs))

    def _is_solid(self, wanted: Wanted) -> bool:
        places = self.comparison.places
        return any(places.get(name) == wanted.place for name in self.comparison.solid)


def refusal(error: trocar.TrocarError) -> str:
    """Return why a call was refused, as a stable name."""
    return str(getattr(error, "reason", "") or type(error).__name__)


def asked(ask: Callable[[], trocar.FeatureMaps]) -> trocar.FeatureMaps | str:
    """Return the reply, or why there is none."""
    try:
        return ask()
    except trocar.TrocarError as error:
        return refusal(error)


def refused_alike(
    outcome: Outcome, *replies: trocar.FeatureMaps | str, one_sided: Collection[str] = ()
) -> bool:
    """Record refusals: both ways refuse for one true reason, or none does.

    `one_sided` are true reasons of the second way alone.
    """
    reasons = [reply if isinstance(reply, str) else "" for reply in replies]
    if not any(reasons):
        return False
    outcome.refused = reasons[0] or reasons[-1]
    if not reasons[0] and reasons[-1] in one_sided:
        return True
    if len(set(reasons)) > 1:
        outcome.comparison.refuse(f"refused in one way: {reasons}")
    elif outcome.refused not in TRUE_REFUSALS:
        outcome.comparison.refuse(f"refused without a true reason: {outcome.refused}")
    return True


def compare_bits(
    comparison: Comparison, mine: Parts, theirs: Parts, same: Callable[[Any, Any], bool] = same_bits
) -> None:
    """Compare two replies, by default bit for bit."""
    if mine.keys() != theirs.keys():
        comparison.refuse(f"parts {sorted(mine.keys() ^ theirs.keys())} are in one reply only")
    for part in mine.keys() & theirs.keys():
        comparison.note(part, mine[part], theirs[part], same)


def named(request: Request, reply: Any) -> dict[str, Wanted]:
    """Return the taps by the names that they have in a reply."""
    named: dict[str, Wanted] = {}
    for wanted in request.wanted:
        for name in reply.expansions.get(wanted.tap.selector, ()) or [wanted.tap.alias or ""]:
            named[name] = wanted
    for wanted in request.wanted:
        if wanted.tap.alias:
            named[wanted.tap.alias] = wanted
    return named
