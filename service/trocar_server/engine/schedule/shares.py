"""Shares: what each flow has had, against what all that wait have had each. Bound to no thread or loop."""

_KEPT = 64
"""Flows beside those that wait now that are kept before old ones are looked for."""


class Shares:
    """Counts by how much flows are behind the others, up to a bound.

        shares = Shares(most=2.0)
        shares.spend("alice", 0.3, waiting=3)
        shares.behind("bob")                    # 2.0: nobody has seen him before

    Args:
        most: The most that a flow is behind, in the unit of the costs.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._share = 0.0
        """What a flow that always waits has had."""
        self._had: dict[str, float] = {}
        """The same of each flow; of others it is less than the share by `_most`."""

    def spend(self, flow: str, cost: float, waiting: int) -> None:
        """Count what a flow gets, or a refund when negative, while so many flows wait, itself included."""
        if not self._most:
            return
        least = self._share - self._most
        self._had[flow] = max(self._had.get(flow, least), least) + cost
        self._share += cost / waiting
        if len(self._had) > 2 * waiting + _KEPT:
            least = self._share - self._most
            self._had = {other: had for other, had in self._had.items() if had > least}

    def behind(self, flow: str) -> float:
        """Return how much less than its share a flow has had; negative if it was more."""
        had = self._had.get(flow)
        return self._most if had is None else min(self._most, self._share - had)
