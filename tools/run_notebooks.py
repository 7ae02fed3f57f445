"""Run notebooks, and store them with their outputs.

    python -m tools.run_notebooks notebooks/*.ipynb     # `make notebooks` runs all

Runs in .venv-notebooks, which has Jupyter's kernel and sees the packages of .venv. A notebook is written only
if all of its cells ran; outputs are in the normal form of tools/notebooks.py.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tools.notebooks import DIGEST, normal, source_digest

TIMEOUT_S = 900
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "TQDM_DISABLE": "1"}
"""One thread, so that sums have the same order everywhere."""


def run(text: str, folder: str) -> str:
    """Run a notebook, and return its file with outputs.

    Args:
        text: The file.
        folder: The working directory.

    Raises:
        CellExecutionError: A cell failed.
    """
    notebook = nbformat.reads(text, as_version=4)
    client = NotebookClient(
        notebook, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    client.execute()
    result = json.loads(nbformat.writes(notebook))
    result["metadata"]["trocar"] = {DIGEST: source_digest(result["cells"])}
    return normal(json.dumps(result))


def main(paths: list[str]) -> None:
    """Run notebooks one after the other, and write them."""
    os.environ.update(ENVIRONMENT)
    for path in map(Path, paths):
        with tempfile.TemporaryDirectory() as folder:
            text = run(path.read_text(encoding="utf-8"), folder)
        path.write_text(text, encoding="utf-8")
        print(f"{path}: {len(text) / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
