"""Declarations: frozen dataclasses read from messages whose fields have the same names.

    declared(Noise, "edits[0].noise", message.noise)

The message's descriptor and the dataclass's fields say everything, so there is no code for each of them: an
unset optional field takes the dataclass's default, an enum's number becomes the member of the same name.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from trocar_api.v1 import edit_pb2, tensor_pb2
from trocar_server.rpc.codec.fields import MAX_TEXT_CHARACTERS, check_count, invalid
from trocar_server.rpc.codec.wire_dtypes import from_wire, tensor_operand_from_wire
from trocar_server.tensors.edits import Operand

Declared = TypeVar("Declared")
Member = TypeVar("Member", bound=Enum)
_MAX_NUMBERS = 1 << 16
"""Of one field; declarations have limits of their own, which are not higher."""
_Reader = Callable[[str, Any], Any]
"""From a field's name in errors and its value."""


def declared(declaration: type[Declared], field: str, message: Message) -> Declared:
    """Convert a message to a dataclass; `field` is the message's name in errors.

    Raises:
        ServiceError: `INVALID_ARGUMENT` or `INVALID_TENSOR`, with the field named; what the dataclass raises.
    """
    values = {
        name: read(f"{field}.{name}", getattr(message, name))
        for name, read, is_optional in _readers(cast("Any", declaration), message.DESCRIPTOR)
        if not (is_optional and not message.HasField(name))
    }
    return declaration(**values)


def operand_from_wire(field: str, message: edit_pb2.Operand) -> Operand:
    """Convert a number, or the description of a tensor.

    Raises:
        ServiceError: `INVALID_ARGUMENT` or `INVALID_TENSOR`, with the field named.
    """
    kind = message.WhichOneof("kind")
    if kind is None:
        raise invalid(field, "needs a constant or a tensor")
    return message.constant if kind == "constant" else tensor_operand_from_wire(field, message.tensor)


def members_by_number(
    enum: EnumDescriptor, members: type[Member], unset: Member | None = None
) -> Mapping[int, Member]:
    """Return the member of each number of a wire enum, by name; `AXIS_TOKENS` is `Axis.TOKENS`.

    Args:
        enum: The wire's enum. Its names begin with its own name.
        members: The server's enum.
        unset: What the number 0 means; it is left out when None.
    """
    prefix = enum.values[0].name.removesuffix("UNSPECIFIED")
    result = {value.number: members[value.name.removeprefix(prefix)] for value in enum.values[1:]}
    return result if unset is None else {0: unset, **result}


@cache
def _readers(declaration: type[Any], message: Descriptor) -> tuple[tuple[str, _Reader, bool], ...]:
    """Return name, reader and whether the default stands for an unset field, for each field."""
    hints = get_type_hints(declaration)
    readers = []
    for field in dataclasses.fields(declaration):
        wire = message.fields_by_name[field.name]
        default = None if field.default is dataclasses.MISSING else field.default
        is_optional = wire.has_presence and field.default is not dataclasses.MISSING
        readers.append((field.name, _reader(wire, hints[field.name], default), is_optional))
    return tuple(readers)


def _reader(wire: FieldDescriptor, hint: Any, default: Any) -> _Reader:
    if wire.enum_type is not None:
        if wire.enum_type is tensor_pb2.Dtype.DESCRIPTOR:
            return from_wire
        return _member_reader(members_by_number(wire.enum_type, hint, default))
    if wire.message_type is not None:
        is_operand = wire.message_type is edit_pb2.Operand.DESCRIPTOR
        return operand_from_wire if is_operand else tensor_operand_from_wire
    if wire.is_repeated:
        return _numbers
    return _text if wire.type == FieldDescriptor.TYPE_STRING else lambda field, value: value


def _member_reader(members: Mapping[int, Enum]) -> _Reader:
    def read(field: str, number: int) -> Enum:
        if number not in members:
            raise invalid(field, f"{number} is unset or unknown")
        return members[number]

    return read


def _numbers(field: str, values: Sequence[int]) -> tuple[int, ...]:
    check_count(field, len(values), _MAX_NUMBERS)
    return tuple(values)


def _text(field: str, value: str) -> str:
    if len(value) > MAX_TEXT_CHARACTERS:
        raise invalid(field, f"over {MAX_TEXT_CHARACTERS} characters")
    return value
