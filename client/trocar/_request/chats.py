"""Chats: messages of texts and images as a wire entry."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from trocar._base.input_kinds import is_image
from trocar_api.v1 import extraction_pb2 as pb

NOT_SENT = None
"""Stands for an image that is sent beside its chat."""
_IMAGE_KEYS = ("image", "path", "url")


def chat_entry(messages: Sequence[Any]) -> tuple[pb.TextEntry, tuple[Any, ...]]:
    """Return one conversation, and the images within its messages; `NOT_SENT` for those beside it.

    Raises:
        TypeError: Something is no message, or no part of one.
    """
    images: list[Any] = []
    result = [_message(message, images) for message in messages]
    return pb.TextEntry(chat=pb.Chat(messages=result)), tuple(images)


def refuse_missing_images(images: Sequence[Sequence[Any]]) -> None:
    """Refuse chats of which some have their images and others do not.

    Raises:
        ValueError: There are both.
    """
    are_sent = {image is not NOT_SENT for own in images for image in own}
    if len(are_sent) > 1:
        raise ValueError(
            'some images are within messages, others only {"type": "image"}; put all of them into the '
            "messages, or all beside the chat"
        )


def _message(message: object, images: list[Any]) -> pb.ChatMessage:
    if isinstance(message, Mapping) and message.keys() == {"role", "content"}:
        message = (message["role"], message["content"])
    if isinstance(message, tuple) and len(message) == 2 and isinstance(message[0], str):
        role, content = cast("tuple[str, object]", message)
        if isinstance(content, str):
            return pb.ChatMessage(role=role, content=content)
        if isinstance(content, (list, tuple)) and content:
            parts = [_part(part, images) for part in cast("Sequence[object]", content)]
            return pb.ChatMessage(role=role, parts=parts)
    raise TypeError(
        'a message is {"role": ..., "content": ...} or (role, content); the role is a string, the content a '
        "string or a list of texts and images"
    )


def _part(part: object, images: list[Any]) -> pb.ChatPart:
    if isinstance(part, str):
        return pb.ChatPart(text=part)
    if isinstance(part, Mapping):
        given = cast("Mapping[str, Any]", part)
        if given.get("type") == "text" and isinstance(given.get("text"), str):
            return pb.ChatPart(text=given["text"])
        if given.get("type") == "image":
            images.append(next((given[key] for key in _IMAGE_KEYS if key in given), NOT_SENT))
            return pb.ChatPart(image=pb.ChatImage())
    if is_image(part):
        images.append(part)
        return pb.ChatPart(image=pb.ChatImage())
    raise TypeError(
        f"{type(part).__name__} is no part of a message; pass a string, an image, "
        '{"type": "text", "text": ...} or {"type": "image", "image": ...}'
    )
