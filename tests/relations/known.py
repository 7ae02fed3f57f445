"""Today's faults: differences that are expected, each until its issue is done.

Each line has a case of its own that must still differ (`test_known.py`): a fault that is mended must leave
this file.
"""

from collections.abc import Callable
from dataclasses import dataclass

import trocar
from tests.relations.replies import Difference


@dataclass(frozen=True)
class Known:
    """One fault.

    Attributes:
        name: A word for it.
        issue: The issue that mends it.
        reason: What is wrong.
        relations: The relations that see it.
        covers: Whether a difference of a family is of this kind.
        shown_by: Family and tap of a case that shows it; None if a test of its own does.
    """

    name: str
    issue: int
    reason: str
    relations: tuple[str, ...]
    covers: Callable[[str, Difference], bool]
    shown_by: tuple[str, trocar.Tap] | None

    def excuses(self, relation: str, family: str, difference: Difference) -> bool:
        """Whether a difference is expected."""
        return relation in self.relations and self.covers(family, difference)


KNOWN: list[Known] = []
"""Every fault that the relations show today."""


def unexpected(relation: str, family: str, differences: list[Difference]) -> list[Difference]:
    """Return the differences that no line of `KNOWN` explains."""
    return [
        difference
        for difference in differences
        if not any(known.excuses(relation, family, difference) for known in KNOWN)
    ]
