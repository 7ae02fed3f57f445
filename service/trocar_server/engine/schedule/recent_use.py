"""Recent use: seconds of computing by flow, of about the last minute."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping

WINDOW_S = 60
_STEP_S = 10


class RecentUse:
    """Counts seconds by flow, and forgets those that are older than a minute.

        use = RecentUse()
        use.add("alice", 0.3)
        use.seconds()                    # {"alice": 0.3}

    Counts are kept in steps of 10 s, so the window has between 50 and 60 s. Not thread-safe.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[tuple[int, defaultdict[str, float]]] = deque(maxlen=WINDOW_S // _STEP_S)
        """Start of each step, as a multiple of its length, and its seconds by flow."""

    def add(self, flow: str, seconds: float) -> None:
        """Count seconds of a flow."""
        step = int(self._clock() // _STEP_S)
        if not self._steps or self._steps[-1][0] != step:
            self._steps.append((step, defaultdict(float)))
        self._steps[-1][1][flow] += seconds

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of each flow."""
        step = int(self._clock() // _STEP_S)
        while self._steps and self._steps[0][0] <= step - WINDOW_S // _STEP_S:
            self._steps.popleft()
        found: defaultdict[str, float] = defaultdict(float)
        for _, counts in self._steps:
            for flow, seconds in counts.items():
                found[flow] += seconds
        return found
