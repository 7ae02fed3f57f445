"""Tables and other views of results, as HTML for a notebook and as short text.

The HTML sets no style of its own, so it is readable in light and in dark themes. Every text is escaped:
names of models, modules and labels come from servers and users.
"""

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import chain
from typing import Any, TypeVar

from trocar._base.text_tables import Row, text_table

Entry = TypeVar("Entry")
Columns = Mapping[str, Callable[[Entry], str]]
"""The text of each column of a table by its title."""

MOST_ROWS = 60
"""Rows of a table in a notebook, and of a printed list."""
_MOST_LINES = 8


class Listing(list[Entry]):
    """A list that a notebook shows as a table, equal to the plain list of its entries.

    Columns that are empty in every row are left out.

    Args:
        entries: The entries.
        columns: The columns of its table.
    """

    def __init__(self, entries: Iterable[Entry], columns: Columns[Entry]) -> None:
        super().__init__(entries)
        self._columns = columns

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # copies and pickles are plain lists: columns are functions

    def __repr__(self) -> str:
        return first_lines(self._text()) if self else "[]"

    def __str__(self) -> str:
        return first_lines(self._text(), MOST_ROWS + 1) if self else "[]"

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return html_table(*self._table())

    def _text(self) -> str:
        return text_table(*self._table())

    def _table(self) -> tuple[Row, list[Row]]:
        """Return the titles and the rows."""
        columns = {title: [text(entry) for entry in self] for title, text in self._columns.items()}
        shown = {title: cells for title, cells in columns.items() if any(cells) or not self}
        return tuple(shown), list(zip(*shown.values(), strict=True))


def html_table(head: Row, rows: Iterable[Row], caption: str = "") -> str:
    """Return the same as HTML, of the first 60 rows."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return _table(chain([top], _shortened(list(cells), len(head))), caption)


def html_facts(facts: Mapping[str, object], caption: str = "") -> str:
    """Return a table of one row for each fact; those that are None or an empty text are left out."""
    shown = {name: str(value) for name, value in facts.items() if value is not None}
    rows = [f"<th>{escape(name)}</th><td>{escape(text)}</td>" for name, text in shown.items() if text]
    return _table(_shortened(rows, 2), caption)


def html_fold(summary: str, content: str) -> str:
    """Return HTML that is folded behind a line of text."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def html_picture(png: bytes, text: str) -> str:
    """Return a picture, and the text that stands for it where none can be shown."""
    return f'<img alt="{escape(text)}" src="data:image/png;base64,{b64encode(png).decode()}">'


def first_lines(text: str, most: int = _MOST_LINES) -> str:
    """Return a text of at most `most` lines; the last one tells how many others there are."""
    lines = text.splitlines()
    if len(lines) <= most:
        return text
    return "\n".join([*lines[: most - 1], f"… and {len(lines) - most + 1:,} more"])


def number_text(value: float) -> str:
    """Write a number with five digits."""
    return f"{value:.5g}"


def size_text(byte_count: int) -> str:
    """Write a number of bytes for a person: `97.8 MB`."""
    size, units = float(byte_count), ["B", "kB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _table(rows: Iterable[str], caption: str) -> str:
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _shortened(rows: Sequence[str], width: int) -> list[str]:
    left = len(rows) - MOST_ROWS
    more = [f'<td colspan="{width}">… and {left:,} more</td>'] if left > 0 else []
    return [*rows[:MOST_ROWS], *more]
