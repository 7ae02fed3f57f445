"""Texts as inputs on the command line: `--text` and `--text-file`."""

from pathlib import Path
from typing import Annotated

import typer

from trocar._cli.failures import refuse

TextsOption = Annotated[
    list[str] | None,
    typer.Option("--text", help="A text, instead of files; repeat for more.", metavar="TEXT"),
]
TextFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", exists=True, dir_okay=False, help="A file with one text a line."),
]


def read_texts(text: list[str] | None, text_file: Path | None) -> list[str]:
    """Return the texts of a command; empty lines of a file are left out, and its byte-order mark.

    Raises:
        typer.BadParameter: The file is no UTF-8 text.
    """
    if text_file is None:
        return list(text or ())
    try:
        lines = text_file.read_text(encoding="utf-8-sig").split("\n")  # no other sign ends a line
    except UnicodeDecodeError:
        refuse(f"--text-file: {text_file.name!r} is no UTF-8 text")
    return [*(text or ()), *(line for line in lines if line.strip())]
