"""Lengths of texts: what templates and padding make of a batch, checked before it is padded."""

from collections.abc import Sequence

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.padding import check_padded_bytes, padded_count

_ID_BYTES = 8


def check_tokens(lengths: Sequence[int], padded_tokens: int, most_tokens: int) -> None:
    """Refuse a batch of too many tokens.

    Args:
        lengths: The tokens of each text, or as many as it has at least.
        padded_tokens: Tokens that every text is padded to at least.
        most_tokens: The most of a batch, with its padding.

    Raises:
        ServiceError: `REQUEST_TOO_LARGE`.
    """
    count = padded_count([(length,) for length in lengths], (padded_tokens,))
    if count > most_tokens:
        raise ServiceError(
            ErrorReason.REQUEST_TOO_LARGE,
            f"the batch has {count:,} tokens with its padding, the limit is {most_tokens:,}; send fewer or "
            "shorter texts",
            limit=str(most_tokens),
        )


def check_text_bytes(lengths: Sequence[int], padded_length: int, name_count: int, most_bytes: int) -> None:
    """Refuse tokens that become too many bytes with their padding.

    Args:
        lengths: The tokens of each text.
        padded_length: What each is padded to.
        name_count: Arguments that are made, such as the token ids and their mask.
        most_bytes: The most that one call may have.

    Raises:
        ServiceError: `REQUEST_TOO_LARGE`.
    """
    count = padded_count([(length,) for length in lengths], (padded_length,))
    longest = f"{padded_length:,} tokens"
    check_padded_bytes("texts", len(lengths), longest, count * name_count * _ID_BYTES, most_bytes)


def check_rendered(character_count: int, most_bytes: int) -> None:
    """Refuse chats of which a template makes too much.

    Raises:
        ServiceError: `REQUEST_TOO_LARGE`.
    """
    if character_count > most_bytes:
        raise ServiceError(
            ErrorReason.REQUEST_TOO_LARGE,
            f"the chat template makes {character_count:,} characters of the chats, and one call may have "
            f"{most_bytes:,} bytes; send fewer or shorter chats",
            limit=str(most_bytes),
        )
