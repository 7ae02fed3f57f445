"""Tables of plain text that fit a terminal.

Cells fold between words, after commas, and names after dots and slashes; a word is never broken. Where even
that does not fit, each row becomes a few lines: its first cell, and the others with their titles below it.
"""

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

Row = Sequence[str]

GAP = 2
"""Spaces between columns."""
_PIECE = re.compile(r"[^\s./,]*(?:[./,]+\s*|\s+|$)")
"""What stays on one line when a cell is folded."""
_WIDTH: ContextVar[int | None] = ContextVar("table_width", default=None)


@contextmanager
def table_width(width: int | None) -> Iterator[None]:
    """Fit text tables that are made inside the context into so many columns; None is no limit."""
    before = _WIDTH.set(width)
    try:
        yield
    finally:
        _WIDTH.reset(before)


def text_table(head: Row, rows: Iterable[Row], right: Iterable[str] = ()) -> str:
    """Return an aligned table, within `table_width`.

    Args:
        head: The columns' titles.
        rows: One cell for each title.
        right: The titles of the columns that hold numbers.
    """
    numbers, cells = set(right), [list(row) for row in rows]
    widths = fitted_widths(head, cells, numbers, _WIDTH.get())
    if widths is None:
        return "\n".join(line for row in cells for line in record_lines(head, row, _WIDTH.get() or 0))
    is_number = [title in numbers for title in head]
    return "\n".join(line for row in (head, *cells) for line in _lines(row, widths, is_number))


def fitted_widths(
    head: Row, rows: Sequence[Row], whole: Collection[str], width: int | None, gap: int = GAP
) -> list[int] | None:
    """Return a width for each column so that all fit; None if they cannot.

    Args:
        head: The columns' titles.
        rows: One cell for each title.
        whole: Titles of columns whose cells are never folded.
        width: Columns of the terminal; no limit when None.
        gap: Spaces between columns.
    """
    columns = [[row[column] for row in rows] for column in range(len(head))]
    widths = [max(map(len, (title, *cells)), default=0) for title, cells in zip(head, columns, strict=True)]
    if width is None:
        return widths
    least = [
        max(_longest_piece(title), *(map(len, cells) if title in whole else map(_longest_piece, cells)), 0)
        for title, cells in zip(head, columns, strict=True)
    ]
    room = width - gap * (len(head) - 1)
    if sum(least) > room:
        return None
    while sum(widths) > room:
        shrinkable = [column for column, size in enumerate(widths) if size > least[column]]
        widths[max(shrinkable, key=widths.__getitem__)] -= 1
    return widths


def folded(text: str, width: int) -> list[str]:
    """Split a cell into lines that add up to it, of at most `width` characters where no piece is longer."""
    lines = [""]
    for piece in _PIECE.findall(text):
        if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
            lines.append(piece)
        else:
            lines[-1] += piece
    return lines


def record_lines(head: Row, row: Row, width: int) -> list[str]:
    """Return a row as its first cell and, indented below it, the others with their titles."""
    name = [line.rstrip() for line in folded(row[0], width)]
    named = [f"{title} {cell}".strip() for title, cell in zip(head[1:], row[1:], strict=True) if cell]
    lines = textwrap.wrap(
        "; ".join(named),
        max(width, 20),
        initial_indent="    ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [*name, *lines]


def _longest_piece(text: str) -> int:
    return max(len(piece.rstrip()) for piece in _PIECE.findall(text))


def _lines(cells: Row, widths: Sequence[int], is_number: Sequence[bool]) -> Iterator[str]:
    """Yield the lines of a row, of which numbers are on the first."""
    parts = [
        [cell] if len(cell) <= width else folded(cell, width)
        for cell, width in zip(cells, widths, strict=True)
    ]
    for index in range(max(map(len, parts))):
        texts = [part[index].rstrip() if index < len(part) else "" for part in parts]
        padded = (
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(texts, widths, is_number, strict=True)
        )
        yield (" " * GAP).join(padded).rstrip()
