"""Writes the options of edit operations for the page, as a JavaScript module to stdout.

The page's forms have the SDK's names of options and the protocol's fields. Which field an option sets is
found by building the operation with two values of the option, so nothing is listed twice.
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from trocar._request.edit_json import json_name
from trocar._request.edit_operations import OPERATIONS, build_operation
from trocar_api.v1 import edit_pb2 as pb

_PROBES: tuple[tuple[Any, Any], ...] = (
    ([1.0], [1.0, 2.0]),  # first: a number would be a tensor, too, and of the same shape
    (0.5, 0.25),
    (1, 2),
    (True, False),
    ("a", "b"),
)
"""Pairs of values, one of which every option without choices takes."""
_OF_STORED_DIRECTIONS = ("units",)
"""Options that go with the name of a stored direction alone."""
_NAME = "a"
"""The name of one."""
_NEEDED: Mapping[str, Mapping[str, float]] = {"cap": {"low": -1.0}}
"""What an operation needs beside its required options: one limit of two."""


def options() -> dict[str, list[dict[str, Any]]]:
    """Return the options of each operation, in the order of the SDK.

    Of each its `name` in JSON and its `argument` in Python, the `field` of the operation's message (empty if
    the operand is the operation; of a `DirectionEdit` where it goes with the name of one), its `choices`, its
    `default`, and whether it `isRequired`.
    """
    return {
        operation: [_option(operation, name) for name in _parameters(operation)] for operation in OPERATIONS
    }


def _option(operation: str, name: str) -> dict[str, Any]:
    first, second = _accepted(operation, name)
    field = _changed_field(_built(operation, name, first), _built(operation, name, second))
    default = _parameters(operation)[name].default
    is_required = default is inspect.Parameter.empty
    return {
        "name": json_name(name),
        "argument": name,
        "field": "" if field is None else field.name,
        "choices": [] if field is None else _choices(operation, name, field),
        "default": None if is_required else default,
        "isRequired": is_required,
    }


def _parameters(operation: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(OPERATIONS[operation]).parameters


def _accepted(operation: str, name: str) -> tuple[Any, Any]:
    """Return two different values that the option takes."""
    for first, second in (*_PROBES, *_pairs_of_names()):
        if _takes(operation, name, first) and _takes(operation, name, second):
            return first, second
    raise ValueError(f"no probe fits the option {name} of {operation}")


def _pairs_of_names() -> Iterator[tuple[str, str]]:
    for field in _fields(pb.Edit.DESCRIPTOR):
        if field.enum_type is not None:
            names = _names(field.enum_type)
            yield from ((one, other) for one in names for other in names if one < other)


def _fields(message: Any) -> Iterator[FieldDescriptor]:
    for operation in message.oneofs_by_name["operation"].fields:
        if operation.message_type is not None:
            yield from operation.message_type.fields


def _names(enum: EnumDescriptor) -> list[str]:
    """Return the names of an enum's values without their common prefix."""
    unspecified = enum.values_by_number[0].name
    prefix = unspecified.removesuffix("UNSPECIFIED")
    return [value.name.removeprefix(prefix).lower() for value in enum.values[1:]]


def _choices(operation: str, name: str, field: FieldDescriptor) -> list[str]:
    if field.enum_type is None:
        return []
    return [choice for choice in _names(field.enum_type) if _takes(operation, name, choice)]


def _takes(operation: str, name: str, value: object) -> bool:
    try:
        _built(operation, name, value)
    except (TypeError, ValueError):
        return False
    return True


def _built(operation: str, name: str, value: object) -> Message:
    """Return the operation's message, with the option set and the other required ones as well as possible."""
    required = {
        other: _NAME if name in _OF_STORED_DIRECTIONS else _accepted(operation, other)[0]
        for other, parameter in _parameters(operation).items()
        if other != name and parameter.default is inspect.Parameter.empty
    }
    given = {**_NEEDED.get(operation, {}), **required, name: value}
    edit, _ = build_operation(operation, (), given)
    message: Message = getattr(edit, str(edit.WhichOneof("operation")))
    return message


def _changed_field(one: Message, other: Message) -> FieldDescriptor | None:
    """Return the field in which two messages of an operation differ; None if they are operands themselves."""
    if isinstance(one, pb.Operand):
        return None
    before, after = dict(one.ListFields()), dict(other.ListFields())
    (field,) = (field for field in {**before, **after} if before.get(field) != after.get(field))
    return field


if __name__ == "__main__":
    print("// Generated by tools/page_operations.py.")
    print(f"export const OPTIONS = {json.dumps(options(), indent=1)};")
