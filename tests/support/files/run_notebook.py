"""Runs a notebook, cell by cell, as Jupyter does; for tests, as a program of its own.

    python run_notebook.py notebook.ipynb picture.png "len(names) == 48" "share > 0.9"

Cells run inside of a running event loop, as in Jupyter's kernel, and what a cell ends in is shown. The last
cell must show one picture, which is saved. Then each expression, over the notebook's names, must be true.
What each cell printed, and the text of its value, is written beside the picture as JSON.
"""

import ast
import asyncio
import io
import json
import linecache
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def run_cell(source: str, name: str, names: dict[str, Any]) -> list[bytes]:
    """Run a cell, and return the pictures that Jupyter would show behind it, as PNG."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for tracebacks
    body = ast.parse(source).body
    shown = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), name, "exec"), names)
    pictures = []
    if isinstance(shown, ast.Expr):
        value = eval(compile(ast.Expression(shown.value), name, "eval"), names)
        pictures = [] if source.endswith(";") else view(value)
    return [*pictures, *pyplot_pictures()]


def view(value: Any) -> list[bytes]:
    """Make the views of a cell's value, and return those that are pictures."""
    if value is None:  # which Jupyter does not show
        return []
    if not hasattr(value, "_repr_png_"):
        print(repr(value))
    if hasattr(value, "_repr_html_"):
        value._repr_html_()
    return [value._repr_png_()] if hasattr(value, "_repr_png_") else []


def pyplot_pictures() -> list[bytes]:
    """Return the open figures of pyplot, and close them."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    import matplotlib.pyplot as plt

    found = []
    for number in plt.get_fignums():
        png = io.BytesIO()
        plt.figure(number).savefig(png, format="png")
        found.append(png.getvalue())
    plt.close("all")
    return found


@contextmanager
def printed(texts: list[str]) -> Iterator[None]:
    """Append what is printed inside the context to a list, also by programs that are started there."""
    sys.stdout.flush()
    terminal = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(terminal, 1)
            os.close(terminal)
            file.seek(0)
            texts.append(file.read().decode())


async def run_cells(sources: list[str], names: dict[str, Any], title: str, texts: list[str]) -> list[bytes]:
    """Run all cells, append what each prints, and return the pictures of the last one."""
    pictures: list[bytes] = []
    for number, source in enumerate(sources, 1):
        with printed(texts):
            pictures = run_cell(source, f"<{title}, code cell {number}>", names)
    return pictures


def main(notebook: Path, picture: Path, expressions: list[str]) -> None:
    """Run a notebook, save its picture, and check what it came to."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    texts: list[str] = []
    pictures = asyncio.run(run_cells(sources, names, notebook.name, texts))
    picture.with_suffix(".json").write_text(json.dumps(texts), encoding="utf-8")
    if len(pictures) != 1:
        sys.exit(f"the last cell shows {len(pictures)} pictures")
    picture.write_bytes(pictures[0])
    wrong = [expression for expression in expressions if not eval(expression, names)]
    if wrong:
        sys.exit(f"not true: {'; '.join(wrong)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
