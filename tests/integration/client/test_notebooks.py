"""The notebooks run from top to bottom, say what is so, and end in a picture."""

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support import ROOT
from tests.support.files import run_notebook
from tests.support.files.markdown import links
from tests.support.servers import warm_python
from tests.support.wire.pictures import colour_count
from tools.notebooks import normal

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_CELLS = 10
ENVIRONMENT = {
    "MPLBACKEND": "agg",
    "OMP_NUM_THREADS": "1",  # two threads wait for each other where other tests use both cores
}

NO_TORCH = "'torch' not in sys.modules"

CLAIMS = {
    "1-features-of-a-folder": ["len(names) == 48", "vectors.shape == (48, 1280)", "share > 0.9"],
    "2-channel-ablation": [
        "[one.before.name for one in found.classes] == ['Egyptian cat', 'espresso']",
        "[one.is_changed for one in found.classes] == [True, False]",
        "abs(np.corrcoef(losses.T)[0, 1]) < 0.3",
        "len(channels) == 30",
    ],
    "3-grad-cam": [
        "cam.class_names == ('Egyptian cat',)",
        "cam.values.shape == (1, 7, 7)",
        "cams.class_names == ('Egyptian cat', 'espresso')",
        "left_share[0] > 0.7",
        "left_share[1] < 0.3",
    ],
    "4-patching": [
        "tokens[8] == 'river'",
        "tokens[5] == 'bank'",
        "(moved[:5, 8] > 0.75).all()",
        "(moved[:5, 5] > 0.1).all()",
        "(abs(np.delete(moved[:5], [5, 8], axis=1)) < 0.05).all()",
        "(moved[5] > 0.05).all()",
    ],
    "5-remote-fine-tuning": [
        "history.outcome == 'finished'",
        "right > 0.9 * len(found)",
        NO_TORCH,
        "server.returncode == 0",
    ],
    "6-spool": [
        "losses == all_losses",
        "all_report.written_bytes == 0",
        "report.written_bytes > 0",
        "report.peak_bytes < all_report.peak_bytes / 2",
        "memory == sorted(memory, reverse=True)",
        "disk == sorted(disk)",
    ],
    "7-two-models": [
        "len(found.classes) == 6",
        "0 < len(found.changed) < 6",
        "found['_blocks.15'].cosine < found['_blocks.0'].cosine",
    ],
    "8-my-own-model": [
        "untrained.shape == trained.shape == (1797, 2)",
        "accuracy > 0.8",
        "np.ptp(trained) > 100 * np.ptp(untrained)",
    ],
}
"""What the texts of a notebook say, as expressions over its names."""

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


@pytest.mark.timeout(1200)
@notebooks
def test_a_notebook_runs_and_ends_in_a_picture(path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    claims = CLAIMS[path.stem]
    start = subprocess.Popen if NO_TORCH in claims else warm_python.Popen
    command = [sys.executable, run_notebook.__file__, str(path), str(picture), *claims]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, **ENVIRONMENT, "TMPDIR": folder}
        process = start(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the server that a failed notebook left
    assert process.returncode == 0, printed
    assert list(tmp_path.iterdir()) == [picture]
    with Image.open(picture) as shown:
        assert min(shown.size) > 300
        assert colour_count(shown) > 100


def test_every_notebook_has_claims() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(CLAIMS)


@notebooks
def test_a_notebook_is_in_normal_form(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == normal(text), f"python -m tools.notebooks {path.relative_to(ROOT)}"


@notebooks
def test_a_notebook_is_short_and_every_cell_is_explained(path: Path) -> None:
    kinds = [cell["cell_type"] for cell in cells(path)]
    assert kinds.count("code") <= MOST_CELLS
    assert all(before == "markdown" for before, kind in pairwise(kinds) if kind == "code")
    assert "".join(cells(path)[0]["source"]).startswith("# ")


@notebooks
def test_a_notebook_names_the_extra_and_uses_public_names_only(path: Path) -> None:
    code = ["".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "code"]
    assert code[0].startswith('# pip install "trocar[')
    imported = {
        name
        for node in ast.walk(ast.parse("\n".join(code)))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert {name for name in imported if name.startswith("trocar")} == {"trocar"}


def test_normal_form_drops_what_a_machine_leaves() -> None:
    cell = {"cell_type": "code", "execution_count": 7, "id": "f3a9", "source": "a = 1\na\n"}
    saved = {**cell, "outputs": [{"output_type": "stream"}], "metadata": {"collapsed": True}}
    text = json.dumps({"cells": [saved], "metadata": {"language_info": {"version": "3.11.7"}}})
    (found,) = json.loads(normal(text))["cells"]
    assert found["source"] == ["a = 1\n", "a"]
    assert (found["id"], found["execution_count"], found["outputs"], found["metadata"]) == (
        "cell-01",
        None,
        [],
        {},
    )
    assert "3.11.7" not in normal(text)
    assert normal(normal(text)) == normal(text)


def test_the_page_lists_every_notebook() -> None:
    page = ROOT / "docs" / "notebooks.md"
    listed = [(page.parent / link).resolve() for link in links(page) if link.endswith(".ipynb")]
    assert listed == NOTEBOOKS
