"""Inference texts: BYTES of a request that the model's own tokenizer takes."""

from collections.abc import Sequence
from typing import Any

from trocar_api.reasons import ErrorReason
from trocar_server.models.inputs import TOKEN_IDS
from trocar_server.processing.inputs import TextEntry, TextInput
from trocar_server.rpc.codec.fields import invalid
from trocar_server.rpc.oip.datatypes import BYTES

_NAMES = ("text", "texts", TOKEN_IDS)


def is_texts(name: str, datatype: str) -> bool:
    """Whether an input is texts: BYTES by a name of texts. BYTES of other names are images."""
    return datatype == BYTES and name in _NAMES


def text_input(field: str, shape: Sequence[int], strings: Sequence[Any]) -> TextInput:
    """Return texts, or pairs of texts.

    Args:
        field: For errors.
        shape: (count,), (count, 1) or, for pairs, (count, 2).
        strings: UTF-8, as many as the shape says.

    Raises:
        ServiceError: `INPUT_REJECTED`, one is no UTF-8 or empty.
    """
    texts = [_text(field, index, data) for index, data in enumerate(strings)]
    if tuple(shape[1:]) == (2,):
        pairs = zip(texts[::2], texts[1::2], strict=True)
        return TextInput("", tuple(TextEntry("pair", pair) for pair in pairs))
    return TextInput("", tuple(TextEntry("text", text) for text in texts))


def check_texts(texts: Sequence[TextInput]) -> None:
    """Refuse texts under two names.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    if len(texts) > 1:
        raise invalid("inputs", f"texts are given under two of the names {', '.join(_NAMES)}; send one")


def _text(field: str, index: int, data: Any) -> str:
    try:
        text = bytes(data).decode()
    except UnicodeDecodeError:
        raise invalid(field, f"text {index} is not UTF-8", ErrorReason.INPUT_REJECTED) from None
    if not text:
        raise invalid(field, f"text {index} is empty", ErrorReason.INPUT_REJECTED)
    return text
