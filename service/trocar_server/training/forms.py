"""What pydantic says about a description, in words with the path of the field."""

import pydantic

from trocar_server.training.problems import Problems

_OPTION = "must be a number, a text, true or false, or a list of numbers or texts"


def form_problems(error: pydantic.ValidationError, problems: Problems) -> None:
    """Note every entry of a validation error, one for each option."""
    for entry in error.errors(include_url=False):
        location = entry["loc"]
        if "options" in location[:-1]:  # one entry for each type that an option might have had
            end = location.index("options") + 2
            problems.add(_field(location[:end]), _OPTION)
        else:
            problems.add(_field(location), _MESSAGES.get(entry["type"], entry["msg"]))


_MESSAGES = {
    "missing": "is required",
    "extra_forbidden": "there is no such field",
}


def _field(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")
