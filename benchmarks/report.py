"""Rows of results, printed as a table that `docs/performance.md` can take over."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One figure: a ratio, its target, and what it was measured against."""

    name: str
    ratio: float
    target: float | None = None
    note: str = ""
    higher_is_better: bool = False

    @property
    def verdict(self) -> str:
        """`hit`, `miss`, or nothing without a target."""
        if self.target is None:
            return ""
        return (
            "hit"
            if (self.ratio >= self.target) is self.higher_is_better or self.ratio == self.target
            else "miss"
        )


def print_rows(title: str, rows: Sequence[Row]) -> None:
    """Print a Markdown table."""
    print(f"\n### {title}\n\n| | measured | target | | |\n|---|---|---|---|---|")
    for row in rows:
        sign = ">=" if row.higher_is_better else "<="
        target = "" if row.target is None else f"{sign} {row.target:.2f}"
        print(f"| {row.name} | {row.ratio:.2f} | {target} | {row.verdict} | {row.note} |", flush=True)
