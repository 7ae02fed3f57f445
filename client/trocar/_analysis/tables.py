"""Results as tables: plain text for a terminal, HTML for a notebook."""

from collections.abc import Iterable, Sequence
from html import escape

Row = Sequence[str]


def text_table(head: Row, rows: Iterable[Row], right: Iterable[str] = ()) -> str:
    """Return an aligned table.

    Args:
        head: The columns' titles.
        rows: As many cells each as there are titles.
        right: The titles of the columns that hold numbers.
    """
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    numbers = set(right)
    is_number = [title in numbers for title in head]
    return "\n".join(_line(line, widths, is_number) for line in lines)


def html_table(head: Row, rows: Iterable[Row], caption: str = "") -> str:
    """Return the same as HTML."""
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{title}<tr>{top}</tr>{body}</table>"


def number_text(value: float) -> str:
    """Write a number with five digits."""
    return f"{value:.5g}"


def _line(cells: Row, widths: Sequence[int], is_number: Sequence[bool]) -> str:
    padded = (
        cell.rjust(width) if number else cell.ljust(width)
        for cell, width, number in zip(cells, widths, is_number, strict=True)
    )
    return "  ".join(padded).rstrip()
