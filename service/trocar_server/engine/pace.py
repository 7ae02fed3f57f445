"""How long passes took, to know which of them end soon whatever happens."""

from collections import OrderedDict
from collections.abc import Hashable

# A pass shorter than this needs no guard: a cancelled call has to let go of its replica within 50 ms.
_SHORT_S = 0.04
_KEPT = 256


class Pace:
    """Remembers the last duration of each kind of pass of one model."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[Hashable, float] = OrderedDict()

    def is_short(self, kind: Hashable) -> bool:
        """Whether a pass of this kind was over in no time when it last ran; False for a new kind."""
        return self._seconds.get(kind, _SHORT_S) < _SHORT_S

    def note(self, kind: Hashable, seconds: float) -> None:
        """Remember how long a pass took."""
        self._seconds[kind] = seconds
        self._seconds.move_to_end(kind)
        if len(self._seconds) > _KEPT:
            self._seconds.popitem(last=False)
