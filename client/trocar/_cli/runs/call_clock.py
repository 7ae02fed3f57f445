"""Time breakdown of a command with many passes."""

import time

from trocar import FeatureMaps


class CallClock:
    """Sums the server's timing of each pass; the rest of the time is transfer and files.

    Batches overlap: while one is computed the next is sent. So the rest is what computing did not hide.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._queue_s = self._compute_s = 0.0
        self._batch_count = 0

    def add(self, maps: FeatureMaps) -> None:
        """Add one pass."""
        self._queue_s += maps.timing.queue_s
        self._compute_s += maps.timing.compute_s
        self._batch_count += 1

    def report(self) -> dict[str, float]:
        """Return seconds by activity, and the number of batches."""
        total_s = time.perf_counter() - self._started
        return {
            "batch_count": self._batch_count,
            "queue_s": self._queue_s,
            "compute_s": self._compute_s,
            "transfer_s": max(0.0, total_s - self._queue_s - self._compute_s),
            "total_s": total_s,
        }

    def __str__(self) -> str:
        result = self.report()
        parts = ", ".join(f"{name} {result[name + '_s']:.3f} s" for name in ("queue", "compute", "transfer"))
        batches = "1 batch" if self._batch_count == 1 else f"{self._batch_count} batches"
        return f"{batches} in {result['total_s']:.3f} s: {parts}"
