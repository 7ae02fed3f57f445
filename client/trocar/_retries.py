"""How often, and when, a call is made again that a busy server has refused."""

import random
import time
from collections.abc import Callable

from trocar.errors import ServerBusyError

_FIRST_S, _LONGEST_S = 0.1, 10.0
_JITTER = 0.5


class BusyRetries:
    """The attempts of one call.

        retries = BusyRetries(count=3, timeout_s=60)
        while True:
            try:
                return call(timeout_s=retries.remaining_s())
            except ServerBusyError as error:
                pause_s = retries.pause_s(error)
                if pause_s is None:
                    raise
            time.sleep(pause_s)

    The server says when to come again; half as long again at the most is added by chance, so that those who
    were refused together do not come together. Without its word, pauses double.

    Args:
        count: Attempts after the first one.
        timeout_s: For all attempts and pauses together, in seconds.
        clock: Seconds that only grow.
        chance: A number from 0 to 1.
    """

    def __init__(
        self,
        count: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._left = self._count = count
        self._clock, self._chance = clock, chance
        self._timeout_s = timeout_s
        self._ends: float | None = None

    def remaining_s(self) -> float:
        """Return how long the next attempt may take; the first one gets all of it."""
        if self._ends is None:
            self._ends = self._clock() + self._timeout_s
            return self._timeout_s
        return max(self._ends - self._clock(), 0.001)

    def pause_s(self, error: ServerBusyError) -> float | None:
        """Return how long to wait before the next attempt; None where there is none, or no time for it."""
        if not self._left:
            return None
        asked_s = error.retry_after_s
        if asked_s is None:
            asked_s = _FIRST_S * 2 ** (self._count - self._left)
        pause_s = min(asked_s, _LONGEST_S) * (1 + _JITTER * self._chance())
        if asked_s > _LONGEST_S or pause_s >= self.remaining_s():
            return None
        self._left -= 1
        return pause_s
