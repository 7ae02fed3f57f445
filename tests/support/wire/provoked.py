"""Requests of every method with a given text wherever a text can be, made from the descriptors."""

from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.support.wire.methods import Method

_DEPTH = 2


def request_of(method: Method) -> Message:
    """Return an empty request of a method."""
    service = descriptor_pool.Default().FindServiceByName(method.service)
    found: Message = message_factory.GetMessageClass(service.methods_by_name[method.name].input_type)()
    return found


def requests_with(method: Method, text: str) -> Iterator[Message]:
    """Yield one request for each place of a text, at most one message deep, and one with all at once."""
    every = request_of(method)
    for path in _places(every.DESCRIPTOR, _DEPTH):
        single = request_of(method)
        for message in (single, every):
            _put(message, path, text)
        yield single
    yield every


def _places(descriptor: Any, depth: int) -> Iterator[tuple[FieldDescriptor, ...]]:
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            yield (field,)
        elif field.message_type is not None and depth > 1 and not field.message_type.GetOptions().map_entry:
            for inner in _places(field.message_type, depth - 1):
                yield (field, *inner)


def _put(message: Any, path: tuple[FieldDescriptor, ...], text: str) -> None:
    field, *rest = path
    if rest:
        inner = getattr(message, field.name)
        _put(inner.add() if field.is_repeated else inner, tuple(rest), text)
    elif field.is_repeated:
        getattr(message, field.name).append(text)
    else:
        setattr(message, field.name, text)


def everything_said(call: Any) -> str:
    """Return all that a caller is told about how a call ended."""
    metadata = [f"{key}={value!r}" for key, value in (call.trailing_metadata() or ())]
    return "\n".join([str(call.details()), *metadata])


def outcome(method: Method, channel: grpc.Channel, message: Message, **options: Any) -> tuple[Any, str]:
    """Make a call; returns its code and all that the caller is told."""
    call = method.call(channel, [message.SerializeToString()], **options)
    return call.code(), everything_said(call)
