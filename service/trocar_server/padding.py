"""Padding: how large a batch becomes whose samples are all padded to the largest of them.

A small request becomes a large one so: 500 clips of sound of which one is long. This is the one place of
the count, for texts, sound and images, in the server and in its worker processes. Nothing is padded that was
not counted.
"""

import math
from collections.abc import Collection, Sequence

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError


def padded_count(sizes: Collection[Sequence[int]], least: Sequence[int] = ()) -> int:
    """Return the number of elements of a padded batch.

    Args:
        sizes: The size of each sample in each dimension that is padded.
        least: What each dimension is padded to at least.
    """
    largest: list[int] = [max(each) for each in zip(*sizes, *([least] if least else []), strict=True)]
    return len(sizes) * math.prod(largest)


def check_padded_bytes(what: str, sample_count: int, longest: str, byte_count: int, most_bytes: int) -> None:
    """Refuse a batch that padding makes too large; not worth a retry.

    Args:
        what: The samples, in the plural.
        sample_count: Their number.
        longest: The size of the largest one, for people.
        byte_count: Bytes of the padded batch.
        most_bytes: The most that one call may have.

    Raises:
        ServiceError: `REQUEST_TOO_LARGE`.
    """
    if byte_count > most_bytes:
        raise ServiceError(
            ErrorReason.REQUEST_TOO_LARGE,
            f"{sample_count:,} {what} become at least {byte_count:,} bytes, as all are padded to the longest "
            f"of {longest}, and one call may have {most_bytes:,}; send texts of similar lengths together, or "
            "fewer",
            byte_count=str(byte_count),
            limit=str(most_bytes),
        )
