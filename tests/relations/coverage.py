"""Which pairs of fields, families and relations were drawn with values that can show a difference."""

from collections import defaultdict
from itertools import combinations

from tests.relations.outcome import Outcome

SAYS_LITTLE = frozenset(("length", "split", "open_inference", "start_at"))
"""Relations that know statistics or plain taps only: they do not count in `fields x relations`."""


class Coverage:
    """Counts outcomes whose replies had finite values that are not all the same."""

    def __init__(self) -> None:
        self.fields: defaultdict[str, int] = defaultdict(int)
        self._by_family: set[tuple[str, str]] = set()
        self._by_relation: set[tuple[str, str]] = set()
        self._pairs: set[tuple[str, str]] = set()
        self._ran: set[tuple[str, str]] = set()
        self._families: set[str] = set()
        self._relations: set[str] = set()

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        self._families.add(outcome.family)
        self._relations.add(outcome.relation)
        fields = outcome.fields
        if not fields:
            return
        self._ran.add((outcome.family, outcome.relation))
        for field in fields:
            self.fields[field] += 1
            self._by_family.add((field, outcome.family))
            if outcome.relation not in SAYS_LITTLE:
                self._by_relation.add((field, outcome.relation))
        self._pairs.update(combinations(sorted(fields), 2))

    def shares(self) -> dict[str, float]:
        """Return the shares of pairs that were drawn; that each field is drawn is `test_fields.py`."""
        fields, families, relations = len(self.fields), len(self._families), len(self._relations)
        return {
            "families x relations": len(self._ran) / max(1, families * relations),
            "fields x families": len(self._by_family) / max(1, fields * families),
            "fields x relations": len(self._by_relation)
            / max(1, fields * len(self._relations - SAYS_LITTLE)),
            "fields x fields": len(self._pairs) / max(1, fields * (fields - 1) // 2),
        }

    def table(self) -> str:
        """Return the shares as lines."""
        return "\n".join(f"{name:22} {share:6.1%}" for name, share in self.shares().items())
