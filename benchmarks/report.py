"""Report: figures, rows and tables of results, as Markdown for `docs/performance.md` and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

MEASURED = "measured"
"""The column of a table that has only one."""
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Figure:
    """One number, its target, or the reason for its absence."""

    value: float | None
    """What was measured; None where it was not."""
    target: float | None = None
    """What it should reach; None for no target."""
    higher_is_better: bool = False
    """Whether the target is a lower limit."""
    unit: str = ""
    """Of the number; nothing for a ratio."""
    reason: str = ""
    """Why there is no number."""

    @property
    def verdict(self) -> str:
        """`hit`, `miss`, or nothing without a target or a number."""
        if self.target is None or self.value is None:
            return ""
        good = self.value >= self.target if self.higher_is_better else self.value <= self.target
        return "hit" if good else "miss"

    @property
    def text(self) -> str:
        """The number with its unit; NaN is no number."""
        if self.value is None:
            return NOT_MEASURED
        return f"{number_text(self.value)} {self.unit}".strip()

    @property
    def target_text(self) -> str:
        """The target with its sign; nothing without one."""
        if self.target is None:
            return ""
        return f"{'>=' if self.higher_is_better else '<='} {self.target:g} {self.unit}".strip()


@dataclass(frozen=True)
class Row:
    """Measurements of one subject, by column."""

    name: str
    """What it is."""
    figures: Mapping[str, Figure]
    """By the titles of columns."""
    note: str = ""
    """What else there is to say."""


@dataclass(frozen=True)
class Table:
    """Rows that belong together."""

    title: str
    """What they are about."""
    rows: Sequence[Row]
    """The results."""
    columns: Sequence[str] = (MEASURED,)
    """Their titles."""
    note: str = ""
    """What was measured against what."""

    def markdown(self) -> str:
        """Return it as Markdown: one column with its target beside it, or several with it in each cell."""
        return _single(self.rows) if len(self.columns) == 1 else _several(self.rows, self.columns)


def row(
    name: str,
    value: float | None,
    target: float | None = None,
    note: str = "",
    *,
    higher_is_better: bool = False,
    unit: str = "",
    reason: str = "",
) -> Row:
    """Return a row of a table with one column."""
    return Row(name, {MEASURED: Figure(value, target, higher_is_better, unit, reason)}, note)


def number_text(value: float) -> str:
    """Write a number with two digits behind the point, more where it is small, none where it is large."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 0.1 or not value else f"{value:.2g}"


def _single(rows: Iterable[Row]) -> str:
    lines = ["| | measured | target | | |", "|---|---|---|---|---|"]
    for entry in rows:
        figure = next(iter(entry.figures.values()))
        note = "; ".join(part for part in (figure.reason, entry.note) if part)
        cells = (entry.name, figure.text, figure.target_text, _marked(figure.verdict), note)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _several(rows: Iterable[Row], columns: Sequence[str]) -> str:
    lines = [f"| | {' | '.join(columns)} | |", "|---" * (len(columns) + 2) + "|"]
    for entry in rows:
        cells = [_cell(entry.figures.get(column)) for column in columns]
        lines.append(f"| {' | '.join([entry.name, *cells, entry.note])} |")
    return "\n".join(lines)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    if figure.value is None:
        return f"{NOT_MEASURED}: {figure.reason}" if figure.reason else NOT_MEASURED
    around = ", ".join(part for part in (figure.target_text, _marked(figure.verdict)) if part)
    return f"{figure.text} ({around})" if around else figure.text


def _marked(verdict: str) -> str:
    return "**miss**" if verdict == "miss" else verdict


@dataclass(frozen=True)
class Section:
    """The tables of one part of the benchmark, and their environment."""

    tables: Sequence[Table]
    """The results."""
    machine: Mapping[str, str] = field(default_factory=dict)
    """What it was, with which versions, and when."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def section_from_json(data: Mapping[str, Any]) -> Section:
    """Return the section that `to_json` serialised."""
    return Section([_table(entry) for entry in data["tables"]], dict(data["machine"]))


def _table(data: Mapping[str, Any]) -> Table:
    rows = [
        Row(
            entry["name"],
            {name: Figure(**figure) for name, figure in entry["figures"].items()},
            entry["note"],
        )
        for entry in data["rows"]
    ]
    return Table(data["title"], rows, tuple(data["columns"]), data["note"])
