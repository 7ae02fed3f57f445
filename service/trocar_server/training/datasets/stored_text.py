"""Stored text: one sample of a data set of texts, as JSON in UTF-8.

    "a text"    ["a text", "another one"]    [101, 7592, 102]    {"words": ["a", "text"]}

A text, a pair of texts, token ids, or words. Tokenizers belong to models, and a data set to none.
"""

import json
from typing import Any

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.processing.inputs import TextEntry

MAX_TEXT_BYTES = 4 << 20
"""The most bytes of one sample."""
_MAX_ID = 1 << 31


def parse_text(data: bytes) -> TextEntry:
    """Parse a sample.

    Raises:
        ValueError: It is none; the message says why.
    """
    if len(data) > MAX_TEXT_BYTES:
        raise ValueError(f"it has {len(data):,} bytes, the most is {MAX_TEXT_BYTES:,}")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON in UTF-8") from None
    if _is_text(value):
        return TextEntry("text", value)
    if isinstance(value, list) and len(value) == 2 and all(map(_is_text, value)):
        return TextEntry("pair", tuple(value))
    if isinstance(value, list) and value and all(type(each) is int and 0 <= each < _MAX_ID for each in value):
        return TextEntry("ids", tuple(value))
    if isinstance(value, dict) and list(value) == ["words"] and _are_words(value["words"]):
        return TextEntry("words", tuple(value["words"]))
    raise ValueError("it is neither a text, a pair of texts, token ids nor words, or a text is empty")


def text_of_sample(index: int, data: bytes) -> TextEntry:
    """Parse a sample of a data set.

    Raises:
        ServiceError: `DATASET_INVALID`, it is no text; the sample is named.
    """
    try:
        return parse_text(data)
    except ValueError as error:
        raise ServiceError(
            ErrorReason.DATASET_INVALID,
            f"sample {index} of the data set cannot be used: {error}",
            sample=str(index),
        ) from None


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_text(value: Any) -> bool:
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which no tokenizer takes
        return False
    return True
