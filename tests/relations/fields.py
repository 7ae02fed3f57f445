"""The fields of a request, read from the descriptors of the protocol."""

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from trocar_api.v1 import extraction_pb2 as pb

NOT_DRAWN = {
    "ExtractRequest.model_id": "is the family",
    "ExtractRequest.chunks": "carries the payloads of all calls",
    "ExtractRequest.payload_digest": "is the way `cached`",
    "ExtractRequest.shared_payload": "is chosen by the client, see the way `prepared`",
    "ExtractRequest.shared_reply": "is chosen by the client, see the way `prepared`",
    "SegmentRange.": "is chosen by the client",
    "TensorChunk.": "carries payloads",
    "Image.encoded_size": "is read by `Plan` alone",
}
"""Fields that no request of the generator has, or all of a message, with the reason."""

_SIMPLE = ("TensorSpec.dtype", "TensorSpec.shape")


def is_drawn(name: str) -> bool:
    """Whether a generator must draw a field."""
    return not any(name.startswith(field) if field.endswith(".") else name == field for field in NOT_DRAWN)


def every_field() -> frozenset[str]:
    """Return the names of all fields, and values of enums, that a request may have and a generator draws.

    For example `Tap.alias` and `PoolKind.POOL_KIND_GEM`.
    """
    return frozenset(filter(is_drawn, _fields(pb.ExtractRequest.DESCRIPTOR, set())))


def _fields(message: Descriptor, seen: set[str]) -> Iterator[str]:
    if message.name in seen:
        return
    seen.add(message.name)
    for field in message.fields:
        yield f"{message.name}.{field.name}"
        if field.message_type is not None:
            yield from _fields(field.message_type, seen)
        elif field.enum_type is not None:
            yield from _values(field.enum_type)


def _values(enum: EnumDescriptor) -> Iterator[str]:
    """The values of an enum, without the one that means not set."""
    yield from (f"{enum.name}.{value.name}" for value in enum.values if value.number)


def fields_of(message: Any) -> frozenset[str]:
    """Return the names of the fields that a request has, those of its parts included."""
    return frozenset(filter(is_drawn, _said(message)))


def _said(message: Any) -> Iterator[str]:
    for field, value in message.ListFields():
        yield f"{message.DESCRIPTOR.name}.{field.name}"
        values = value if _is_repeated(field) else [value]
        for each in values:
            if field.message_type is not None:
                yield from _said(each)
            elif field.enum_type is not None:
                yield f"{field.enum_type.name}.{field.enum_type.values_by_number[each].name}"


def _is_repeated(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)
