"""Usage errors: what is wrong with a command line, in one sentence, and the command's usage in one line.

    error: --batch must be a whole number, not 'x'
    usage: trocar extract [OPTIONS] MODEL [SOURCE]...
    all options: trocar extract --help

typer's classes of these errors have no public names; they are told apart by what they have.
"""

import re
from typing import Any

from trocar_api.value_words import nearest_word, refusals

_IN_PYTHON = "values are collected as they are; in Python, it is"
_ELSEWHERE = {
    "--reduce": f"{_IN_PYTHON} trocar.tap(..., reduce=trocar.pool('avg'))",
    "--pool": f"{_IN_PYTHON} trocar.tap(..., reduce=trocar.pool('avg'))",
    "--cast": f"{_IN_PYTHON} trocar.tap(..., cast='float16')",
    "--taps": "it is --tap SELECTOR, once for each",
    "--layer": "it is --tap SELECTOR",
    "--layers": "it is --tap SELECTOR, once for each",
    "--model": "the model is an argument without an option",
    "--address": "it is --server ADDRESS",
    "--url": "it is --server ADDRESS",
    "--output": "it is --out",
    "--server": "this command works on this machine and connects to no server",
    "--config": "a profile is chosen with --profile; only the server's commands read a configuration",
}
"""Options that callers look for, and where the thing is."""
_MOVED = {
    **dict.fromkeys(("health", "fid", "cka", "rsa", "dead", "nearest", "top"), "analyse {}"),
    **dict.fromkeys(("load", "unload", "drain", "reload", "token", "convert"), "admin {}"),
    "ready": "status --ready",
    "info": "status",
    "diff": "compare MODEL IMAGES --other MODEL",
    "demo-train": "demo train",
    "demo-text": "demo text",
}
"""Commands that callers look for, and where they are."""
_CHOICE = " is not one of "
_NO_COMMAND = re.compile(r"No such command '(?P<name>[^']*)'", re.DOTALL)
_EXTRA = re.compile(r"Got unexpected extra arguments?(\(s\))? \((?P<words>.*)\)", re.DOTALL)
_TAKES_NONE = re.compile(r"Option '(?P<name>[^']*)' does not take a value")
_NEEDS_ONE = re.compile(r"Option '(?P<name>[^']*)' requires")


def is_usage_error(error: Exception) -> bool:
    """Whether typer refused the command line; its class for that has no public name."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def usage_message(error: Any) -> str:
    """Return what is wrong with a command line."""
    option = getattr(error, "option_name", None)
    parameter = getattr(error, "param", None)
    if type(error).__name__ == "NoSuchOption" and option is not None:
        return _no_option(error, str(option))
    if type(error).__name__ == "MissingParameter" and parameter is not None:
        return _missing(error, parameter)
    if parameter is not None:
        return _refused(error, parameter)
    message = str(error.message)
    match = _NO_COMMAND.match(message)
    if match is not None:
        return _no_command(error, match["name"])
    match = _EXTRA.match(message)
    if match is not None:
        return f"too many arguments: {match['words']}"
    match = _TAKES_NONE.match(message)
    if match is not None:
        return f"{match['name']} takes no value"
    match = _NEEDS_ONE.match(message)
    return message if match is None else f"{match['name']} needs a value"


def usage_lines(error: Any) -> list[str]:
    """Return how the command is called, in one line, and where all of its options are listed."""
    context = getattr(error, "ctx", None)
    if context is None:
        return []
    command = context.command_path
    pieces = [plain_metavar(piece) for piece in context.command.collect_usage_pieces(context)]
    return [f"usage: {' '.join([command, *pieces])}", f"all options: {command} --help"]


def is_help(error: Any) -> bool:
    """Whether a command line has nothing but a group's name, to which its help is the answer."""
    return type(error).__name__ == "NoArgsIsHelpError"


def plain_metavar(text: str) -> str:
    """Return `MODEL` for `{MODEL}`, `[IMAGES]...` for `[[IMAGES]...]...`, and `a|b` for `<a|b>`."""
    text = re.sub(r"\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"<(?:list\[)?([^<>\[\]]*)\]?>", r"\1", text)
    return re.sub(r"\[\[(\w+)\]\.\.\.\]\.\.\.", r"[\1]...", text).replace("......", "...")


def _no_option(error: Any, option: str) -> str:
    if option in _ELSEWHERE and option not in _options(error):
        return f"no option {option}: {_ELSEWHERE[option]}"
    near = nearest_word(option, _options(error))
    return f"no option {option}{f'; nearest: {near}' if near else ''}"


def _options(error: Any) -> list[str]:
    context = getattr(error, "ctx", None)
    parameters = [] if context is None else context.command.get_params(context)
    return [
        name for each in parameters for name in (*each.opts, *each.secondary_opts) if name.startswith("--")
    ]


def _no_command(error: Any, name: str) -> str:
    context = getattr(error, "ctx", None)
    names = [] if context is None else list(getattr(context.command, "commands", ()))
    if name in _MOVED:
        return f"no command {name!r}: it is `trocar {_MOVED[name].format(name)}`"
    near = nearest_word(name, names)
    return f"no command {name!r}{f'; nearest: {near}' if near else ''}"


def _missing(error: Any, parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"{_name(parameter)} is missing"
    value = plain_metavar(parameter.display_type(error.ctx)) if hasattr(parameter, "display_type") else ""
    shown = parameter.metavar or value
    return f"{_name(parameter)}{f' {shown}' if shown else ''} is missing"


def _name(parameter: Any) -> str:
    """Return what a parameter is called on the command line."""
    if parameter.param_type_name == "argument":
        return str(plain_metavar(parameter.metavar or parameter.name)).strip("[].")
    return str(max(parameter.opts, key=len))


def _refused(error: Any, parameter: Any) -> str:
    """Return why a value is refused; typer reads values with pydantic."""
    errors: Any = getattr(error.__cause__, "errors", None)
    if not callable(errors):
        return f"{_name(parameter)}: {str(error.message).rstrip('.')}"
    details: Any = errors()
    (_, words), *_ = refusals(details)
    return f"{_name(parameter)} {_choice(words) if _CHOICE in words else words}"


def _choice(words: str) -> str:
    """Return `must be one of ...` for typer's refusal of a choice."""
    value, _, names = words.partition(_CHOICE)
    known = [name.strip("'") for name in names.split(", ")]
    near = nearest_word(value.strip("'"), known)
    return f"must be one of {', '.join(known)}, not {value}{f'; nearest: {near}' if near else ''}"
