"""Validation errors of pydantic, worded with the path of the field."""

import pydantic

from trocar_api.value_words import refusals
from trocar_server.training.spec.problems import Problems

_OPTION = "must be a number, a string, true or false, or a list of numbers or strings"


def validation_problems(error: pydantic.ValidationError, problems: Problems) -> None:
    """Add every refused field, one per option."""
    for location, words in refusals(error.errors(include_url=False)):
        if "options" in location[:-1]:
            end = location.index("options") + 2
            problems.add(_field(location[:end]), _OPTION)
        else:
            problems.add(_field(location), "unknown field" if words == "is unknown" else words)


def _field(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")
