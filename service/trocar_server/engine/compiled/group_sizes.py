"""Group sizes: how many rows to run together, from measurements of one compiled pass."""

_WEIGHT = 0.3
"""Weight of the newest measurement in the running mean."""

_TOLERANCE = 1.1
"""A row of a larger group may take this many times as long: groups save work around the pass."""

_FORGET_AFTER = 256
"""Groups after which a size that was slower is tried again."""


class GroupSizes:
    """Seconds per row by group size, in powers of two, and the limit of the next group.

        sizes = GroupSizes(max_rows=32, max_s=0.1)
        sizes.record(1, 0.004)
        sizes.limit()                    # 2: the next size up is tried
        sizes.record(2, 0.012)
        sizes.limit()                    # 1: two rows together took longer than one after the other

    Args:
        max_rows: The most rows of a group.
        max_s: The longest time that a group may be expected to take, in seconds.
    """

    def __init__(self, max_rows: int, max_s: float) -> None:
        self._max_rows = max_rows
        self._max_s = max_s
        self._per_row_s: dict[int, float] = {}
        self._recorded = 0

    def record(self, rows: int, seconds: float) -> None:
        """Record the duration of a group."""
        self._recorded += 1
        if self._recorded % _FORGET_AFTER == 0:
            self._per_row_s.clear()
        size, now = _size(rows), seconds / max(rows, 1)
        before = self._per_row_s.get(size, now)
        self._per_row_s[size] = before + _WEIGHT * (now - before)

    def limit(self) -> int:
        """Return the most rows that the next group should have; at least 1."""
        size, best_s, result = 1, float("inf"), 1
        while size <= self._max_rows:
            per_row_s = self._per_row_s.get(size)
            if per_row_s is None:
                # One step into an unmeasured size, if the previous size leaves enough time.
                is_short = best_s == float("inf") or best_s * size <= self._max_s
                return size if is_short else result
            if per_row_s > best_s * _TOLERANCE or (size > 1 and per_row_s * size > self._max_s):
                return result
            size, best_s, result = size * 2, min(best_s, per_row_s), size
        return min(result, self._max_rows)


def _size(rows: int) -> int:
    """Return the power of two at or above a number of rows."""
    return 1 << max(rows - 1, 0).bit_length()
