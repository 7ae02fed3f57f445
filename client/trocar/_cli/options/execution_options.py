"""Execution options of passes: numerics, adapter, flags."""

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from trocar._base.call_options import Numerics
from trocar._cli.failures import refuse
from trocar._cli.options.arguments import MAX_INTEGER


class NumericsChoice(StrEnum):
    """Required accuracy against eager PyTorch."""

    EXACT = "exact"
    FAST = "fast"
    BF16 = "bf16"


NumericsOption = Annotated[
    NumericsChoice | None,
    typer.Option(
        "--numerics",
        help="Loosest accuracy to accept: exact, fast (1e-5) or bf16 (cosine 0.9999); looser is faster once "
        "compiled. Default: the model's.",
    ),
]

AdapterOption = Annotated[
    str, typer.Option("--adapter", metavar="NAME", help="One of your LoRA adapters on the model.")
]

FlagTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--flag",
        metavar="NAME=VALUE",
        help="A flag of the model's forward, for example interpolate_pos_encoding=true; repeat for more.",
    ),
]

_WORDS: dict[NumericsChoice, Numerics] = {
    NumericsChoice.EXACT: "exact",
    NumericsChoice.FAST: "fast",
    NumericsChoice.BF16: "bf16",
}


def parse_flags(texts: Sequence[str] | None) -> dict[str, bool | int | str]:
    """Read `name=value` texts: true and false, whole numbers, and strings, in quotation marks where needed.

    Raises:
        typer.BadParameter: A text has no name or no value, or a name is given twice.
    """
    flags: dict[str, bool | int | str] = {}
    for text in texts or ():
        name, sign, value = text.partition("=")
        if not (name and sign):
            refuse(f"--flag: {text!r} is not NAME=VALUE; write for example interpolate_pos_encoding=true")
        if name in flags:
            refuse(f"--flag: {name!r} is given twice")
        flags[name] = _flag_value(value)
    return flags


def _flag_value(text: str) -> bool | int | str:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        refuse(f"--flag: {text} is larger than {MAX_INTEGER:,}")
    return value if isinstance(value, (bool, int, str)) else text


def wire_numerics(choice: NumericsChoice | None) -> Numerics | None:
    """Return the name that `extract` uses."""
    return None if choice is None else _WORDS[choice]
