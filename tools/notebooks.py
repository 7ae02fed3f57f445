"""Normal form of the notebooks: ids by position, and outputs without anything of the machine that made them.

    python -m tools.notebooks notebooks/*.ipynb     # rewrites those that are not in it

Jupyter saves counts, random ids, warnings, paths and times: they would change with every save. `make
notebooks` runs the notebooks and writes them in this form; see tools/run_notebooks.py.
"""

import base64
import hashlib
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]

METADATA: Json = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
DIGEST = "sources_sha256"
"""The entry of a notebook's metadata below `trocar`: the digest of the sources that its outputs are of."""
_KINDS = ("text/plain", "text/html", "image/png")
"""What is kept of an output."""
_COLOURS = 128
"""Of a stored picture."""
_VARIES = (
    (re.compile(r"(?:/private)?(?:/var/folders/[\w/+]+|/tmp)(?:/tmp\w+)+"), "/tmp/..."),
    (re.compile(r"\bat 0x[0-9a-f]+"), "at 0x..."),
    (re.compile(r"\b\d+(?:\.\d+)? (?:ms|s)\b"), "... s"),
    (re.compile(r"\b[0-9a-f]{32}\b"), "..."),
    (re.compile(r"\b(127\.0\.0\.1|localhost):\d+"), r"\1:..."),
)
"""What differs between two runs, and what is stored in its place: paths, addresses, times, ids, ports."""
_EMBEDDED = re.compile(r"(?<=data:image/png;base64,)[A-Za-z0-9+/=]+")


def normal(text: str) -> str:
    """Return a notebook's file in normal form.

    Args:
        text: The file, of nbformat 4.
    """
    notebook = json.loads(text)
    cells = [_cell(position, cell) for position, cell in enumerate(notebook["cells"], 1)]
    counts = iter(range(1, len(cells) + 1))
    for cell in cells:
        if cell.get("outputs"):
            cell["execution_count"] = next(counts)
            for output in cell["outputs"]:
                if "execution_count" in output:
                    output["execution_count"] = cell["execution_count"]
    metadata = {**METADATA, **{key: value for key, value in notebook["metadata"].items() if key == "trocar"}}
    result = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(result, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def source_digest(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the SHA-256 of the sources of the code cells, as hexadecimal digits."""
    sources = [source_of(cell) for cell in cells if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def source_of(cell: Mapping[str, Any]) -> str:
    """Return the source of a cell."""
    return "".join(cell["source"]).strip("\n")


def output_text(cell: Mapping[str, Any]) -> str:
    """Return what a cell prints, and the text of its value behind it; a picture has none."""
    texts = [
        "".join(output["text"] if output["output_type"] == "stream" else output["data"].get("text/plain", ""))
        for output in cell["outputs"]
        if "image/png" not in output.get("data", {})
    ]
    return "\n".join(text.rstrip("\n") for text in texts)


def without_variation(text: str) -> str:
    """Return a text with dots in place of temporary paths, addresses, ports and times."""
    for pattern, dots in _VARIES:
        text = pattern.sub(dots, text)
    return text


def _cell(position: int, cell: Json) -> Json:
    kept: Json = {
        "cell_type": cell["cell_type"],
        "id": f"cell-{position:02}",
        "metadata": {},
        "source": source_of(cell).splitlines(keepends=True),
    }
    if cell["cell_type"] != "code":
        return kept
    outputs = [_output(output) for output in _joined(cell.get("outputs", []))]
    return kept | {"execution_count": None, "outputs": [output for output in outputs if output]}


def _joined(outputs: Sequence[Json]) -> list[Json]:
    """Return outputs with printed text that follows each other in one; without warnings and logs."""
    result: list[Json] = []
    for output in outputs:
        if output["output_type"] != "stream":
            result.append(output)
        elif output.get("name") == "stdout":
            text = "".join(output["text"])
            if result and result[-1]["output_type"] == "stream":
                text = result.pop()["text"] + text
            result.append({"name": "stdout", "output_type": "stream", "text": text})
    return result


def _output(output: Json) -> Json | None:
    if output["output_type"] == "stream":
        return {**output, "text": without_variation(output["text"]).splitlines(keepends=True)}
    data = {
        kind: _content(kind, "".join(value))
        for kind, value in output.get("data", {}).items()
        if kind in _KINDS
    }
    count = {"execution_count": None} if output["output_type"] == "execute_result" else {}
    return {"data": data, "metadata": {}, "output_type": output["output_type"], **count} if data else None


def _content(kind: str, text: str) -> str | list[str]:
    if kind == "image/png":
        return smaller_picture(text)
    text = _EMBEDDED.sub(lambda match: smaller_picture(match[0]), text)
    return without_variation(text).splitlines(keepends=True)


def smaller_picture(text: str) -> str:
    """Return a PNG in base64 with few colours and without the version of what drew it.

    A picture that is stored in this form stays as it is.
    """
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(text))) as picture:
        if picture.mode == "P" and not picture.info:
            return text.strip()
        small = picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    png = io.BytesIO()
    small.save(png, format="PNG", optimize=True)
    return base64.b64encode(png.getvalue()).decode()


def main(paths: list[str]) -> None:
    """Rewrite notebooks in normal form."""
    for path in map(Path, paths):
        text = path.read_text(encoding="utf-8")
        if normal(text) != text:
            path.write_text(normal(text), encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
