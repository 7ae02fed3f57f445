"""Times at which a server stored something."""

from datetime import UTC, datetime

from trocar.errors import BadReplyError


def stored_time(name: str, seconds: float) -> datetime:
    """Return a time from its seconds since 1970.

    Raises:
        BadReplyError: There is no such time.
    """
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OSError, OverflowError, ValueError) as error:
        raise BadReplyError(f"{name!r} was stored {seconds} s after 1970") from error
