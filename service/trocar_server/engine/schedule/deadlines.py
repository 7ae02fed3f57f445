"""Deadlines of calls, as times of `time.monotonic()` in seconds; None without one."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError


def left_s(deadline: float | None) -> float | None:
    """Return the seconds until a deadline, 0 once it has passed."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


@asynccontextmanager
async def until(deadline: float | None, what_happened: str) -> AsyncIterator[None]:
    """Stop what is awaited inside at the deadline.

    Raises:
        ServiceError: `DEADLINE_EXCEEDED`, while `what_happened`.
    """
    try:
        async with asyncio.timeout(left_s(deadline)):
            yield
    except TimeoutError:
        raise ServiceError(
            ErrorReason.DEADLINE_EXCEEDED, f"the deadline passed while {what_happened}"
        ) from None
