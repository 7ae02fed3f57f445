"""How long the work of a model takes, learnt from what was done."""

_FIRST_GUESS_S = 0.01
_DOWN, _UP = 0.5, 0.1
_ENOUGH = 3


class Pace:
    """Seconds for each row, as a running average.

        pace = Pace()
        pace.observe(rows=8, seconds=0.12)
        pace.seconds(rows=16)                   # 0.24

    It believes in good news sooner than in bad: first passes are slow, and what is refused because it would
    come too late must not be refused on a rumour.
    """

    def __init__(self) -> None:
        self._row_s = _FIRST_GUESS_S
        self._count = 0

    @property
    def is_known(self) -> bool:
        """Whether enough was done to rely on it."""
        return self._count >= _ENOUGH

    def seconds(self, rows: int = 1) -> float:
        """Return about how long so many rows take."""
        return self._row_s * max(1, rows)

    def observe(self, rows: int, seconds: float) -> None:
        """Take in how long some rows took."""
        row_s = seconds / max(1, rows)
        share = _DOWN if row_s < self._row_s else _UP
        self._row_s = self._row_s + share * (row_s - self._row_s) if self._count else row_s
        self._count += 1
