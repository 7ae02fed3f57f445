"""Console output: tables and JSON to stdout, progress to stderr."""

import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from trocar._base.text_tables import fitted_widths, folded, record_lines, table_width

_PIPE_WIDTH = 100_000
"""Of what is no terminal and says no width."""
_GAP = 3
"""Spaces that rich puts between columns in this style."""


class Rows:
    """Table that fits the terminal without breaking words; see `trocar._base.text_tables`.

    Args:
        titles: Of the columns.
        right: Titles of numeric columns.
        whole: Titles of columns whose cells are not folded; numeric ones are not, either.
    """

    def __init__(self, titles: Sequence[str], right: Iterable[str] = (), whole: Iterable[str] = ()) -> None:
        self.title = ""
        self._titles = tuple(titles)
        self._right = frozenset(right)
        self._whole = self._right | frozenset(whole)
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Append a row, a cell for each column."""
        self._rows.append([cell if isinstance(cell, Text) else Text(cell) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield what rich prints: the title and a table, or lines."""
        if self.title:
            yield Text(self.title, style="bold")
        plain_rows = [[cell.plain for cell in row] for row in self._rows]
        widths = fitted_widths(self._titles, plain_rows, self._whole, options.max_width, _GAP)
        if widths is None:
            for row in plain_rows:
                yield from map(Text, record_lines(self._titles, row, options.max_width))
            return
        yield self._table(widths)

    def _table(self, widths: Sequence[int]) -> Table:
        made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
        for title, width in zip(self._titles, widths, strict=True):
            justify: Literal["left", "right"] = "right" if title in self._right else "left"
            made.add_column(_folded(Text(title), width), justify=justify, no_wrap=True)
        for row in self._rows:
            made.add_row(*(_folded(cell, width) for cell, width in zip(row, widths, strict=True)))
        return made


def _folded(cell: Text, width: int) -> Text:
    if len(cell) <= width:
        return cell
    lines = folded(cell.plain, width)
    offsets = list(itertools.accumulate(map(len, lines[:-1])))
    return Text("\n").join(line for line in cell.divide(offsets))


def show(renderable: RenderableType) -> None:
    """Print to stdout; selectors such as `head[0]` are never taken for markup.

    What is no terminal gets lines as long as they are, or as `COLUMNS` says, without trailing padding.
    """
    console = Console(markup=False, highlight=False, emoji=False, width=_width() or _PIPE_WIDTH)
    if sys.stdout.isatty():
        console.print(renderable)
        return
    with console.capture() as captured:
        console.print(renderable, soft_wrap=_width() is None)
    print(_utf8("\n".join(line.rstrip() for line in captured.get().splitlines())))


def show_report(report: object) -> None:
    """Print a result of the client, its tables as wide as the terminal."""
    with table_width(_width()):
        print(report)


def _width() -> int | None:
    """Return the columns of the terminal, or those that `COLUMNS` says; None where there are neither."""
    is_known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return shutil.get_terminal_size().columns if is_known else None


def table(*columns: str, right: Iterable[str] = (), whole: Iterable[str] = ()) -> Rows:
    """Return an empty table.

    Args:
        columns: Their titles.
        right: Titles of numeric columns.
        whole: Titles of columns whose cells are not folded.
    """
    return Rows(columns, right, whole)


def show_json(value: object) -> None:
    """Print JSON; NaN and infinities, which JSON does not have, become strings as in protobuf's JSON.

    Lone surrogates, of paths that are no UTF-8, become JSON's escapes.
    """
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    print(_utf8(text))


def _utf8(text: str) -> str:
    """Return a text whose lone surrogates, of paths that are no UTF-8, are escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def plain(value: Any) -> Any:
    """Convert dataclasses, tuples, arrays and non-finite numbers to JSON values."""
    if is_dataclass(value):
        assert not isinstance(value, type)
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def shape_text(shape: Iterable[int] | None) -> str:
    """Write a shape as NumPy does."""
    return "" if shape is None else str(tuple(shape))


def number_text(value: float) -> str:
    """Write a statistic: counts whole, other numbers with five digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
