"""Unknown fields of a message. Ignoring one could silently change the meaning of an edit."""

from collections.abc import Iterator, Mapping

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from trocar_server.rpc.codec.fields import invalid

# Far more than 256 edits of any kind have; traversing this many takes some 50 ms.
_MAX_PARTS = 65_536


def refuse_unknown_fields(messages: Mapping[str, Message]) -> None:
    """Refuse messages with an unknown field at any depth.

    Args:
        messages: By the name of their field in errors.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with the field named.
    """
    room = _MAX_PARTS
    for field, message in messages.items():
        for part in _parts(message):
            room -= 1
            if room < 0:
                raise invalid(field, f"over {_MAX_PARTS:,} parts; send fewer edits or terms at once")
            unknown = UnknownFieldSet(part)
            if len(unknown):
                raise invalid(
                    field,
                    f"field {unknown[0].field_number} of {part.DESCRIPTOR.name} is not known to this "
                    "server, and was "
                    "sent by a newer client; update the server, or leave the field out",
                )


def _parts(message: Message) -> Iterator[Message]:
    """Yield a message and every message within it; evaluated lazily."""
    waiting: list[Iterator[Message]] = [iter((message,))]
    while waiting:
        part = next(waiting[-1], None)
        if part is None:
            waiting.pop()
            continue
        yield part
        for descriptor, value in part.ListFields():
            if descriptor.message_type is not None:
                waiting.append(iter((value,)) if isinstance(value, Message) else iter(value))
