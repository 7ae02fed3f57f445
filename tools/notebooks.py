"""Normal form of the notebooks: no outputs, ids by position, nothing of the machine that saved them.

    python -m tools.notebooks notebooks/*.ipynb     # rewrites those that are not in it

Jupyter saves outputs, counts, random ids and the name of its kernel: they would change with every save.
"""

import json
import sys
from pathlib import Path
from typing import Any

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def normal(text: str) -> str:
    """Return a notebook's file in normal form.

    Args:
        text: The file, of nbformat 4.
    """
    cells = [_cell(position, cell) for position, cell in enumerate(json.loads(text)["cells"], 1)]
    notebook = {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _cell(position: int, cell: dict[str, Any]) -> dict[str, Any]:
    source = "".join(cell["source"]).strip("\n")
    kept = {
        "cell_type": cell["cell_type"],
        "id": f"cell-{position:02}",
        "metadata": {},
        "source": source.splitlines(keepends=True),
    }
    return kept | ({"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {})


def main(paths: list[str]) -> None:
    """Rewrite notebooks in normal form."""
    for path in map(Path, paths):
        text = path.read_text(encoding="utf-8")
        if normal(text) != text:
            path.write_text(normal(text), encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
