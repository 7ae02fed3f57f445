"""Pace of a model: the multiply-adds in a second of its best passes, and how long another takes at least.

    pace = Pace()
    pace.observe(work=2_000_000_000, seconds=0.4)
    pace.least_s(60_000_000_000)                  # 6.0: half of what the best pass took

# Note: [Evidence of a pace]
A call must not be refused that would have been answered in time. Three things make a pace look slower than
it is: the overhead of small passes, a first pass, and other work on the machine. So the best pass counts,
and it tells of others once three passes of 50 ms and more, or one of a second, were seen, of 64 million
multiply-adds and more each; of a pass that is at most 256 times as large; and half of the time that it gives
is taken. Where there is no such evidence, nothing is refused: the engine then measures passes of sizes
between the model's example and the call's, which take a small part of the time, until they tell.
"""

TELLING_S = 0.05
"""Shorter passes tell of their overhead."""
TELLING_WORK = 1 << 26
"""Passes of fewer multiply-adds tell of their overhead, too, however long they took."""
_LONG_S = 1.0
_ENOUGH = 3
MOST_TIMES = 256
"""How many times as large a pass may be as the largest that was observed."""
_MARGIN = 2.0
_HARMLESS_WORK = 1 << 27
"""Multiply-adds that take no long time anywhere."""
_SLOWEST = 100e6
"""Multiply-adds in a second that any device does in a pass that is not small."""
_SAFE_TIMES = 2
_WATCHED = 8


class Pace:
    """Learns from finished passes. Any thread may read it; the owner thread writes.

    Args:
        example_work: Multiply-adds of the model's example pass.

    Attributes:
        safe_work: Passes of at most so many multiply-adds need no estimate: twice the largest that ran.
        watched_work: Passes of at least so many are worth an observation.
    """

    def __init__(self, example_work: int = 0) -> None:
        self.safe_work = max(_HARMLESS_WORK, _SAFE_TIMES * example_work)
        self.watched_work = 1
        self._rate = 0.0
        """Of the best pass. The overhead of a small one makes it look slower, never faster."""
        self._evidence = 0
        self._largest = 0
        """Work of the largest pass that tells."""
        self._seen = 0

    def observe(self, work: int, seconds: float) -> None:
        """Record a pass that ran to its end."""
        if work <= 0 or seconds <= 0:
            return
        self.safe_work = max(self.safe_work, _SAFE_TIMES * work)
        self._rate = max(self._rate, work / seconds)
        if seconds >= TELLING_S and work >= TELLING_WORK:
            self._evidence += _ENOUGH if seconds >= _LONG_S else 1
            self._largest = max(self._largest, work)
        self._seen += 1
        if self._seen >= _WATCHED:  # of one size, no more is learnt
            self._seen, self.watched_work = 0, max(self.watched_work, work + 1)

    def tells(self, work: int) -> bool:
        """Whether passes were observed that tell of one of this size; see Note: [Evidence of a pace]."""
        return self._evidence >= _ENOUGH and work <= MOST_TIMES * self._largest

    def least_s(self, work: int) -> float:
        """Return the seconds that a pass takes at least; 0 where that is not known."""
        return work / self._rate / _MARGIN if self.tells(work) else 0.0

    def may_exceed(self, work: int, limit_s: float) -> bool:
        """Whether a pass may take longer than a limit, as far as known; cheap, and often wrong."""
        if work <= _HARMLESS_WORK:
            return False
        if self.tells(work):
            return self.least_s(work) > limit_s
        return work > self.safe_work and work / max(self._rate, _SLOWEST) > limit_s
