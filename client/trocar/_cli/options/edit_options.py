"""`--edit`: edits on the command line.

| written                                                       | is                                     |
|---------------------------------------------------------------|----------------------------------------|
| `layer3 scale 0.0 channels=1,2`                               | selector, operation, values, options    |
| `{"at": "layer3", "op": "scale", "factor": 0, "channels": 3}` | the same as JSON; a list is several     |
| `@ablations.json`                                             | what the file has, one edit or a list   |
| `ablate-3`                                                    | edits that were stored under this name  |

A value is a number, `true` or `false`, numbers with commas between them, `@direction.npy` for an array from a
file, or else a text such as `1:8`, `uniform` or `float16`.
"""

import json
import math
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from trocar._base.names import name_hint
from trocar._cli.failures import refuse
from trocar._request.edit_json import edits_from_json
from trocar._request.edit_operations import OPERATIONS, operation_options
from trocar._request.edits import Edit
from trocar._request.stored.stored_edits import check_edits_name
from trocar._sources.arrays import ARRAY_SUFFIX, open_npy
from trocar.errors import SourceError

EditTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--edit",
        metavar="EDIT",
        help="Edit: 'layer3 scale 0.0 channels=1,2', JSON, @file.json or the name of stored "
        "edits; repeat for more, applied in order.",
    ),
]

_WORD = re.compile(r'(?:"(?:\\.|[^"\\])*"|\S)+')
"""A word of the short notation; double quotes may contain spaces, as names in selectors do."""
_OPTION = re.compile(r"([a-z_]+)=(.*)", re.DOTALL)
_AS_TEXT = ("index",)
"""Options that are read as texts: `1,2` is one index of two dimensions."""
_RENAMED = {"at": "from"}
"""`at` is where the edit is; where a swap takes its value from is `from`, as in JSON."""
_WORDS = {"True": True, "False": False, "None": None}
_NUMBER = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
"""A number with a point: JSON has neither `.5` nor `5.`."""
_PLUS = re.compile(r"^\+(?=\d)", re.ASCII)
"""The sign of a number, which JSON does not have."""


def parse_edits(texts: Sequence[str] | None, option: str = "--edit") -> list[Edit | str]:
    """Parse the values of `--edit` or of another option, in order.

    Raises:
        typer.BadParameter: One of them matches none of the notations above.
    """
    edits: list[Edit | str] = []
    for text in texts or ():
        try:
            edits += _parse(text.strip())
        except (TypeError, ValueError, SourceError) as error:
            refuse(f"{option} {text!r}: {error}")
        except OSError as error:
            refuse(f"{option} {text!r}: {error.strerror or error}")
        except RecursionError:
            refuse(f"{option} {text[:80]!r}: nested too deeply")
    return edits


def _parse(text: str) -> list[Edit | str]:
    if text.startswith("@"):
        return edits_from_json(Path(text[1:]).read_bytes())
    if text.startswith(("{", "[")):
        return edits_from_json(text)
    words = _WORD.findall(text)
    if not words:
        raise ValueError("it is empty; write for example 'layer3 scale 0.0 channels=1,2'")
    return [check_edits_name(text)] if len(words) == 1 else [_compact(words)]


def _compact(words: Sequence[str]) -> Edit:
    at, operation, *rest = words
    if operation not in OPERATIONS:
        raise ValueError(f"no operation {operation!r}; {name_hint(operation, OPERATIONS)}")
    names = [_RENAMED.get(name, name) for name in operation_options(operation)]
    values = list(takewhile(lambda word: not _OPTION.fullmatch(word), rest))
    if len(values) > len(names):
        raise ValueError(
            f"{operation} takes {', '.join(names) or 'no value'}; {len(values)} values are given"
        )
    given = {name: _value(word) for name, word in zip(names, values, strict=False)}
    for word in rest[len(values) :]:
        named = _OPTION.fullmatch(word)
        if named is None:
            raise ValueError(f"{word!r} comes after options; positional values come first")
        key = _RENAMED.get(named[1], named[1])
        if key in given:
            raise ValueError(f"{key} is given twice")
        given[key] = named[2] if key in _AS_TEXT else _value(named[2])
    return Edit.from_json({"at": at, "op": operation, **given})


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if text.startswith("@"):
        return _array(Path(text[1:]))
    try:
        return _number(text)
    except ValueError:
        pass
    try:
        return [_number(part) for part in text.split(",")] if "," in text else text
    except ValueError:
        return text


def _number(text: str) -> Any:
    """Read JSON, and numbers as Python writes them: `.5`, `5.` and `+1`.

    Raises:
        ValueError: It is neither.
    """
    if _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return json.loads(_PLUS.sub("", text))


def _array(path: Path) -> Any:
    if path.suffix != ARRAY_SUFFIX:
        raise ValueError(f"{path.name!r} is no {ARRAY_SUFFIX} file; arrays are read from such files")
    return open_npy(path)[...]
