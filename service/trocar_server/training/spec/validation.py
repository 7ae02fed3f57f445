"""Validation errors of pydantic, worded with the path of the field."""

import pydantic
from pydantic_core import ErrorDetails

from trocar_server.training.spec.problems import Problems

_MOST_SHOWN = 60
"""Characters of a value in a message."""
_OPTION = "must be a number, a string, true or false, or a list of numbers or strings"


def validation_problems(error: pydantic.ValidationError, problems: Problems) -> None:
    """Add every entry of a validation error, one per option."""
    for entry in error.errors(include_url=False):
        location = entry["loc"]
        if "options" in location[:-1]:  # one entry for each type of the option's union
            end = location.index("options") + 2
            problems.add(_field(location[:end]), _OPTION)
        else:
            problems.add(_field(location), _MESSAGES.get(entry["type"]) or described(entry))


_MESSAGES = {
    "missing": "is required",
    "extra_forbidden": "unknown field",
}


def described(entry: ErrorDetails) -> str:
    """Return pydantic's message, and the value if it is short."""
    value, message = entry["input"], entry["msg"]
    if isinstance(value, str | int | float) and len(repr(value)) <= _MOST_SHOWN:
        return f"{message}, not {value!r}"
    return message


def _field(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")
