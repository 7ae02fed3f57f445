"""What goes to the terminal: tables and JSON to stdout, progress to stderr."""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table

_PIPE_WIDTH = 200


def show(renderable: RenderableType) -> None:
    """Print to stdout; selectors such as `head[0]` are never taken for markup.

    A pipe gets whole lines, as it has no width to fit, and no padding at their ends.
    """
    is_pipe = not sys.stdout.isatty()
    console = Console(markup=False, highlight=False, emoji=False, width=_PIPE_WIDTH if is_pipe else None)
    if not is_pipe:
        console.print(renderable)
        return
    with console.capture() as captured:
        console.print(renderable)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """Return an empty table.

    Args:
        columns: Their titles.
        right: The titles of those that hold numbers.
    """
    numbers = set(right)
    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for title in columns:
        made.add_column(title, justify="right" if title in numbers else "left", overflow="fold")
    return made


def show_json(value: object) -> None:
    """Print JSON; NaN and infinities, which JSON does not have, become strings as in protobuf's JSON."""
    print(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def plain(value: Any) -> Any:
    """Turn dataclasses, tuples, arrays and non-finite numbers into what JSON has."""
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


def size_text(byte_count: int) -> str:
    """Write a number of bytes for a person: `97.8 MB`."""
    size, units = float(byte_count), ["B", "kB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def number_text(value: float) -> str:
    """Write a statistic: counts whole, other numbers with five digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
