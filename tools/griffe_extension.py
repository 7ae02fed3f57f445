"""griffe extension: shows the client's methods with their own arguments, and usage in docstrings as code.

`extract = delegate("_extraction", Extraction.extract)` is shown as the method of the part, and
`@taking(TrainerOptions)` with the fields of the options as arguments; see `trocar._base.delegation`.
"""

import ast
import copy
import re
import textwrap
from typing import Any

from griffe import Class, Extension, Function, Parameter, ParameterKind, Parameters

_DELEGATED = re.compile(r"^delegate\(\s*['\"]\w+['\"],\s*(\w+)\.(\w+)\)$")
_TAKING = re.compile(r"^taking\((\w+)\)$")


class Signatures(Extension):  # type: ignore[misc, unused-ignore] # griffe is in .venv-docs only
    """Replaces what `delegate` and `taking` make by what they make it of."""

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Go through the package once it is loaded."""
        self._walk(pkg)

    def _walk(self, module: Any) -> None:
        for member in list(module.members.values()):
            if member.is_alias:
                continue
            if member.docstring is not None:
                member.docstring.value = with_code_blocks(member.docstring.value)
            if member.is_module:
                self._walk(member)
            elif member.is_class:
                self._expand_class(member)

    def _expand_class(self, kind: Class) -> None:
        for name, member in list(kind.members.items()):
            if member.is_function:
                self._expand_options(member)
            elif member.is_attribute and (match := _DELEGATED.match(str(member.value))):
                part = kind.resolve(match[1])
                method = kind.modules_collection[f"{part}.{match[2]}"]
                self._expand_options(method)
                kind.set_member(name, copy.copy(method))

    def _expand_options(self, method: Function) -> None:
        for decorator in method.decorators:
            if match := _TAKING.match(str(decorator.value)):
                options = method.modules_collection[method.resolve(match[1])]
                method.parameters = Parameters(method.parameters[0], *_fields(options))
                method.decorators = []
                return


def with_code_blocks(docstring: str) -> str:
    """Indent usage at the margin, where the formatter puts it if nothing else follows the first line."""
    first, *rest = docstring.split("\n\n")
    indented = [part if part.startswith(" ") or not _is_code(part) else _indented(part) for part in rest]
    return "\n\n".join([first, *indented])


def _is_code(paragraph: str) -> bool:
    try:
        return bool(ast.parse(paragraph).body)
    except SyntaxError:
        return False


def _indented(paragraph: str) -> str:
    return textwrap.indent(paragraph, "    ")


def _fields(options: Class) -> list[Parameter]:
    """Return the fields of a dataclass as parameters, its bases' first."""
    result = {parameter.name: parameter for base in options.mro()[::-1] for parameter in _own(base)}
    result |= {parameter.name: parameter for parameter in _own(options)}
    return sorted(result.values(), key=lambda parameter: parameter.kind is ParameterKind.keyword_only)


def _own(options: Class) -> list[Parameter]:
    kind = ParameterKind.positional_or_keyword
    result = []
    for name, field in options.members.items():
        if name == "_":
            kind = ParameterKind.keyword_only
        elif field.is_attribute and field.annotation is not None and "instance-attribute" in field.labels:
            given = re.fullmatch(r"field\((?:.*\b)?default=(.+?)(, kw_only=True)?\)", str(field.value or ""))
            default = given[1] if given else field.value
            chosen = ParameterKind.keyword_only if given and given[2] else kind
            result.append(Parameter(name, annotation=field.annotation, kind=chosen, default=default))
    return result
