"""Throughput of a model: seconds per row, learnt from finished passes."""

_FIRST_GUESS_S = 0.01
_DOWN, _UP = 0.5, 0.1
_ENOUGH = 3


class PassThroughput:
    """Seconds for each row, as a running average.

        throughput = PassThroughput()
        throughput.observe(rows=8, seconds=0.12)
        throughput.seconds(rows=16)                   # 0.24

    It follows faster passes sooner than slower ones: first passes are slow, and a call must not be refused as
    too late on weak evidence.
    """

    def __init__(self) -> None:
        self._row_s = _FIRST_GUESS_S
        self._count = 0

    @property
    def is_known(self) -> bool:
        """Whether there are enough observations to rely on it."""
        return self._count >= _ENOUGH

    def seconds(self, rows: int = 1) -> float:
        """Return about how long a number of rows takes."""
        return self._row_s * max(1, rows)

    def known_seconds(self, rows: int = 1) -> float:
        """Return about how long a number of rows takes; 0 while there are too few observations."""
        return self._row_s * max(1, rows) if self._count >= _ENOUGH else 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Record the time of a number of rows."""
        row_s = seconds / max(1, rows)
        share = _DOWN if row_s < self._row_s else _UP
        self._row_s = self._row_s + share * (row_s - self._row_s) if self._count else row_s
        self._count += 1
