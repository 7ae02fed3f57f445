"""Every number of a request, from the descriptors: where it is, and values that are hardly ever sent."""

import struct
from collections.abc import Iterator
from typing import Any, TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

FieldPath: TypeAlias = tuple[FieldDescriptor, ...]
"""From a request to one of its numbers; each but the last is a message, or a list of them."""

_FLOAT_MAX = struct.unpack("<f", struct.pack("<I", 0x7F7FFFFF))[0]
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-1, -(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-1, -(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
_DOUBLES = (-1.0, -1.7976931348623157e308, 1.7976931348623157e308, float("nan"), float("inf"), -float("inf"))
_FLOATS = (-1.0, -_FLOAT_MAX, _FLOAT_MAX, float("nan"), float("inf"), -float("inf"))


def values_of(field: FieldDescriptor) -> tuple[Any, ...]:
    """Return the values to try for a number: -1, the least, the most, and those that are not finite."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return _DOUBLES
    return _FLOATS if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT else _INTEGERS[field.cpp_type]


def number_paths(message: Descriptor, above: tuple[str, ...] = ()) -> Iterator[FieldPath]:
    """Yield the path of every number of a message, entering each type of message once on a path."""
    for field in message.fields:
        if field.cpp_type in _INTEGERS or field.cpp_type in (
            FieldDescriptor.CPPTYPE_DOUBLE,
            FieldDescriptor.CPPTYPE_FLOAT,
        ):
            yield (field,)
        elif field.message_type is not None and field.message_type.full_name not in above:
            for inner in number_paths(field.message_type, (*above, message.full_name)):
                yield (field, *inner)


def with_parents(message: Any, path: FieldPath, samples: dict[str, Message]) -> Any:
    """Return a copy of a message that has every message on the way to a number, and the one that holds it.

    Args:
        message: The request.
        path: Of the number.
        samples: Messages by the full name of their type, for those on the way that the request lacks.
    """
    copied = type(message)()
    copied.CopyFrom(message)
    _holder(copied, path, samples)
    return copied


def with_value(message: Any, path: FieldPath, value: Any, samples: dict[str, Message]) -> Any:
    """Return a copy of a message in which one number is this; a list of numbers has it in front."""
    copied = with_parents(message, path, samples)
    holder, field = _holder(copied, path, samples), path[-1]
    if not field.is_repeated:
        setattr(holder, field.name, value)
    elif existing := getattr(holder, field.name):
        existing[0] = value
    else:
        existing.append(value)
    return copied


def _holder(message: Any, path: FieldPath, samples: dict[str, Message]) -> Any:
    for field in path[:-1]:
        assert field.message_type is not None
        sample = samples.get(field.message_type.full_name)
        if field.is_repeated:
            message = _of_list(getattr(message, field.name), field.message_type, sample)
        else:
            if not message.HasField(field.name):
                getattr(message, field.name).SetInParent()
                if sample is not None:
                    getattr(message, field.name).CopyFrom(sample)
            message = getattr(message, field.name)
    return message


def _of_list(entries: Any, kind: Descriptor, sample: Message | None) -> Any:
    if kind.GetOptions().map_entry:
        return _MapEntry(entries)
    if not entries:
        entry = entries.add()
        if sample is not None:
            entry.CopyFrom(sample)
    return entries[0]


class _MapEntry:
    """An entry of a map, with the fields of the message that it is on the wire."""

    def __init__(self, entries: Any) -> None:
        self._entries, self._key = entries, next(iter(entries), "key")

    def HasField(self, name: str) -> bool:  # noqa: N802 - as messages have it
        return name == "value"

    @property
    def value(self) -> Any:
        return self._entries[self._key]
