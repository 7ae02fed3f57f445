"""What callers begin and end, so that a kill can be aimed at it."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_DELAY_S = 0.1
"""From an event to the kill."""


class Moments:
    """Counts what happens, and lets one wait for the next of a kind.

    with moments.of("save"):      # "save begins", and "save ended" when it succeeds
        trainer.save()
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.counts: Counter[str] = Counter()

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Say that something begins, and that it ended where it does."""
        self.say(f"{what} begins")
        yield
        self.say(f"{what} ended")

    def wait_for(self, event: str, times: int, longest_s: float) -> bool:
        """Return when an event has come so often from now on, or False where it does not."""
        with self._changed:
            wanted = self.counts[event] + times
            return self._changed.wait_for(lambda: self.counts[event] >= wanted, longest_s)

    def say(self, event: str) -> None:
        """Say that something happened."""
        with self._changed:
            self.counts[event] += 1
            self._changed.notify_all()


def random_delay_s(chance: random.Random, longest_s: float = LONGEST_DELAY_S) -> float:
    """Return a delay, short ones more often: most writes take a few milliseconds."""
    return longest_s * float(chance.random()) ** 3
