"""What pydantic says about a description, in words with the path of the field."""

import pydantic

from trocar_server.training.problems import Problems


def form_problems(error: pydantic.ValidationError, problems: Problems) -> None:
    """Note every entry of a validation error."""
    for entry in error.errors(include_url=False):
        problems.add(_field(entry["loc"]), entry["msg"])


def _field(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")
