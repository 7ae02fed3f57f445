"""The notebooks run from top to bottom, print what is stored, say what is so, and end in a picture."""

import ast
import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.support import ROOT
from tests.support.files import run_notebook
from tests.support.files.markdown import links
from tests.support.servers import warm_python
from tests.support.wire.pictures import colour_count
from tools.notebook_pages import notebook_number
from tools.notebooks import DIGEST, normal, output_text, source_digest, without_variation

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"), key=notebook_number)
MOST_CELLS = 10
MOST_BYTES = 2_000_000
"""Of all notebooks."""
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
RELATIVE = 0.1
"""How far a printed number may be from the stored one: training differs between processors."""
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
    "9-generate": [
        "run.text.startswith(' sad , so she ')",
        "sorted(run.logprobs)[0] < -0.5",
        "sorted(run.logprobs)[1] > -0.1",
        "moment.text.startswith(' happy , so she ')",
        "moment.text.split()[-2] in moods['rainy'][1]",
        "[moment.edit_counts[0].prompt, moment.edit_counts[0].generated] == [1, 0]",
        "steered.text.split()[-2] in moods['sunny'][1]",
        "[steered.edit_counts[0].prompt, steered.edit_counts[0].generated] == [1, 6]",
        "steered.baseline.text == run.text",
        "[row[7][0].text for row in read] == ['happy'] * 3",
        "chances[2, [3, 5]].max() < 0.5",
    ],
    "10-which-layer-knows": [
        "len(sentences) == len(set(sentences)) == 60",
        "fitted.rows[0].place == 'embeddings'",
        "fitted.rows[0].classes == ('complaint', 'praise')",
        "0.7 < fitted.rows[0].score < 0.85",
        "all(row.score > fitted.rows[0].score for row in fitted.rows[1:])",
        "best == fitted.rows[-1].place",
        "fitted.best.score > 0.9",
        "total < 0",
        "abs(total - numbers[-1].mean()) < 1e-3",
        "[tokens[3], tokens[4], tokens[9], tokens[10], tokens[14]] == "
        "['was', 'wonderful', 'was', 'awful', 'rude']",
        "(numbers[:, 4] > 10).all()",
        "(numbers[:, [10, 14]] < -10).all()",
        "abs(numbers[0, 3] - numbers[0, 9]) < 3",
        "(numbers[3:, 3] > numbers[3:, 9] + 3).all()",
    ],
    "11-steer-with-a-direction": [
        "[row.score for row in fitted] == [1, 1, 1]",
        "fitted.rows[0].classes == ('rains', 'shines')",
        "plain.text.split().count('sad') == 3",
        "once.text.split()[0] == 'happy'",
        "once.text.split().count('sad') == 2",
        "[once.edit_counts[0].prompt, once.edit_counts[0].generated] == [1, 0]",
        "everywhere.text.split().count('happy') > 3",
        "everywhere.text.split().count('home') < 3",
        "everywhere.edit_counts[0].generated == 19",
        "everywhere.baseline.text == plain.text",
        "gated.text == plain.text.replace('sad', 'happy')",
        "[gated.edit_counts[0].prompt, gated.edit_counts[0].generated] == [1, 2]",
        "gated.edit_counts[0].gated_out == 23",
        "sunny.text == gated.text",
        "[sunny.edit_counts[0].prompt, sunny.edit_counts[0].generated] == [0, 0]",
        "[place for place in range(26) if plain['sun'][place, 0] < rain] == [6, 13, 20]",
    ],
}
"""What the texts of a notebook say, as expressions over its names."""

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


OTHERWISE = {"9-generate": ("cries", "sighs", "frowns", "smiles", "sings", "dances")}
"""Printed words that are nearly equally likely: any of them may stand for another."""


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
    report = picture.with_suffix(".json")
    assert sorted(tmp_path.iterdir()) == [report, picture]
    check_outputs(path, json.loads(report.read_text(encoding="utf-8")))
    with Image.open(picture) as shown:
        assert min(shown.size) > 300
        assert colour_count(shown) > 100


def check_outputs(path: Path, texts: list[str]) -> None:
    """Compare what cells printed with what is stored: the same words, and nearly the same numbers."""
    stored = [output_text(cell) for cell in cells(path) if cell["cell_type"] == "code"]
    assert len(stored) == len(texts)
    for expected, own in zip(stored, map(without_variation, texts), strict=True):
        assert words(own, path) == words(expected, path)
        for one, other in zip(numbers(own), numbers(expected), strict=True):
            assert one == pytest.approx(other, rel=RELATIVE, abs=0.1), (own, expected)


def words(text: str, path: Path) -> list[str]:
    """Return the words of a text, without numbers and the ends of lines."""
    for word in OTHERWISE.get(path.stem, ()):
        text = text.replace(word, "...")
    return NUMBER.sub("0", text).split()


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "").rstrip(".")) for number in NUMBER.findall(text)]


@notebooks
def test_the_outputs_are_those_of_the_stored_sources(path: Path) -> None:
    stored = json.loads(path.read_text(encoding="utf-8"))
    remedy = f"python -m tools.run_notebooks {path.relative_to(ROOT)}, see `make notebooks`"
    assert stored["metadata"].get("trocar", {}).get(DIGEST) == source_digest(stored["cells"]), remedy
    last = [cell for cell in stored["cells"] if cell["cell_type"] == "code"][-1]
    assert any("image/png" in output.get("data", {}) for output in last["outputs"]), remedy


@notebooks
def test_outputs_have_nothing_of_the_machine_that_made_them(path: Path) -> None:
    for cell in cells(path):
        for output in cell.get("outputs", ()):
            kinds = {kind: text for kind, text in output.get("data", {}).items() if kind != "image/png"}
            text = "".join(map("".join, (output.get("text", ""), *kinds.values())))
            text = re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)
            assert not re.search(r"/(?:home|root|work|Users|usr|opt)/|/tmp/(?!\.\.\.)|0x[0-9a-f]{6}", text)
            assert output.get("name") != "stderr"
            assert output["output_type"] != "error"


def test_the_notebooks_are_small() -> None:
    assert sum(path.stat().st_size for path in NOTEBOOKS) < MOST_BYTES


def test_every_notebook_has_claims() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(CLAIMS)


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


def stored(outputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a code cell in normal form."""
    cell = {"cell_type": "code", "execution_count": 7, "id": "f3a9", "source": "a = 1\na\n"}
    saved = {**cell, "outputs": outputs, "metadata": {"collapsed": True}}
    text = json.dumps({"cells": [saved], "metadata": {"language_info": {"version": "3.11.7"}}})
    assert "3.11.7" not in normal(text)
    assert normal(normal(text)) == normal(text)
    (result,) = json.loads(normal(text))["cells"]
    return dict(result)


def test_normal_form_drops_what_a_machine_leaves() -> None:
    cell = stored([{"output_type": "stream", "name": "stderr", "text": "a warning"}])
    assert cell["source"] == ["a = 1\n", "a"]
    assert (cell["id"], cell["execution_count"], cell["outputs"], cell["metadata"]) == (
        "cell-01",
        None,
        [],
        {},
    )


def test_normal_form_keeps_texts_and_small_pictures() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)
    png, text = io.BytesIO(), "/tmp/tmpx3f/a.txt in 3.2 ms at 0x7f3a2b, on 127.0.0.1:50311"
    Image.fromarray(pixels).save(png, "PNG", pnginfo=_version())
    data = base64.b64encode(png.getvalue()).decode()
    printed = [{"output_type": "stream", "name": "stdout", "text": part} for part in ("one\n", "two\n")]
    value = {
        "output_type": "execute_result",
        "execution_count": 9,
        "data": {"text/plain": text, "text/latex": "x", "image/png": data},
        "metadata": {"image/png": {"width": 40}},
    }
    cell = stored([*printed, value])
    first, second = cell["outputs"]
    assert first == {"name": "stdout", "output_type": "stream", "text": ["one\n", "two\n"]}
    assert (cell["execution_count"], second["execution_count"], second["metadata"]) == (1, 1, {})
    assert set(second["data"]) == {"text/plain", "image/png"}
    assert second["data"]["text/plain"] == ["/tmp/.../a.txt in ... s at 0x..., on 127.0.0.1:..."]
    with Image.open(io.BytesIO(base64.b64decode(second["data"]["image/png"]))) as picture:
        assert (picture.size, picture.info) == ((40, 40), {})
    html = f'<img alt="a" src="data:image/png;base64,{data}">'
    view = {"output_type": "display_data", "data": {"text/html": html}, "metadata": {}}
    embedded = "".join(stored([view])["outputs"][0]["data"]["text/html"])
    assert second["data"]["image/png"] in embedded


def _version() -> PngInfo:
    info = PngInfo()
    info.add_text("Software", "of this machine")
    return info


def test_a_changed_source_has_another_digest() -> None:
    cell: dict[str, Any] = {"cell_type": "code", "source": ["a = 1\n", "a"]}
    text = {"cell_type": "markdown", "source": ["about"]}
    assert source_digest([cell]) == source_digest([text, {**cell, "source": "a = 1\na\n"}])
    assert source_digest([cell]) != source_digest([{**cell, "source": "a = 2\na"}])


def test_the_page_lists_every_notebook() -> None:
    page = ROOT / "docs" / "notebooks.md"
    listed = [(page.parent / link).resolve() for link in links(page) if link.endswith(".ipynb")]
    assert listed == NOTEBOOKS
