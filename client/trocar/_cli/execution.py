"""Options of commands that say how passes may be run."""

from enum import StrEnum
from typing import Annotated

import typer

from trocar._execution import Numerics


class NumericsChoice(StrEnum):
    """How close to eager PyTorch numbers must be."""

    EXACT = "exact"
    FAST = "fast"
    BF16 = "bf16"


NumericsOption = Annotated[
    NumericsChoice | None,
    typer.Option(
        "--numerics",
        help="The loosest numbers that will do: exact, fast (1e-5) or bf16 (cosine 0.9999); faster, once the "
        "server has it ready. The model's default if not given.",
    ),
]

_WORDS: dict[NumericsChoice, Numerics] = {
    NumericsChoice.EXACT: "exact",
    NumericsChoice.FAST: "fast",
    NumericsChoice.BF16: "bf16",
}


def wire_numerics(choice: NumericsChoice | None) -> Numerics | None:
    """Return what `extract` calls it."""
    return None if choice is None else _WORDS[choice]
