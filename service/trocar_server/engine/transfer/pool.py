"""Page-locked host memory, of which there is never more than a bound.

Page-locking takes milliseconds for each piece and takes the memory from everybody else: so pieces are
used again, and where the bound is reached the caller does without.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from trocar_server.engine.plan import Payload

_LEAST_PIECE_BYTES = 64 << 10


class Event(Protocol):
    """Says when a copy is done; as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


@dataclass(eq=False)
class Piece:
    """One piece of page-locked memory.

    Attributes:
        memory: Of single bytes, a power of two of them.
        event: Of the last copy from or to it; None where it was not used yet.
    """

    memory: torch.Tensor
    event: Event | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no copy uses it any more."""
        return self.event is None or self.event.query()


class PinnedPool:
    """Gives out pieces of page-locked memory and takes them back. Owner thread only, except where said.

        piece = pool.take(100_000)          # None: do without
        piece.event = begin_copy(piece.memory)
        payload = pool.lend(piece, 100_000) # given back when nobody has the payload any more

    A piece that was given back is used again when its copy is done, too: so a reply that is dropped while
    its bytes are on their way does no harm.

    Args:
        max_bytes: The most memory of all pieces, those not in use included; 0 gives out none.
        allocate: Makes page-locked memory of this many bytes.
        release: Called when pieces were let go, so that their memory is not kept for later.
    """

    def __init__(
        self, max_bytes: int, allocate: Callable[[int], torch.Tensor], release: Callable[[], None]
    ) -> None:
        self._max_bytes = max_bytes
        self._allocate = allocate
        self._release = release
        self.byte_count = 0
        self._idle: dict[int, deque[Piece]] = {}
        """By size, the one given back first in front."""
        # A finaliser may run on any thread, inside any line: this is all that it touches, and needs no lock.
        self._returned: deque[Piece] = deque()

    def take(self, byte_count: int) -> Piece | None:
        """Return a piece of at least this size that nobody uses; None where the bound leaves no room."""
        self._sort_returned()
        size = max(_LEAST_PIECE_BYTES, 1 << (byte_count - 1).bit_length())
        idle = self._idle.get(size)
        if idle and idle[0].is_idle:
            return idle.popleft()
        if not self._has_room_for(size):
            return None
        try:
            # Ordinary memory, whatever mode it is made in: an inference tensor could not be written later.
            with torch.inference_mode(False):
                memory = self._allocate(size)
        except RuntimeError:  # the system locks no more pages: from now on that is the bound
            self._max_bytes = self.byte_count
            return None
        self.byte_count += size
        return Piece(memory)

    def lend(self, piece: Piece, byte_count: int) -> Payload:
        """Return the first bytes of a piece; it comes back when these and all views of them are gone."""
        # Views of an array keep this very object alive, since it does not own its memory (NumPy's `base`).
        whole = piece.memory.numpy()
        weakref.finalize(whole, self._returned.append, piece).atexit = False
        return whole[:byte_count]

    def give_back(self, piece: Piece) -> None:
        """Take back a piece that nobody has; on any thread."""
        self._returned.append(piece)

    def _sort_returned(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            self._idle.setdefault(piece.memory.nbytes, deque()).append(piece)

    def _has_room_for(self, size: int) -> bool:
        """Whether there is room, if need be by letting go of idle pieces of other sizes."""
        before = self.byte_count
        for other, idle in self._idle.items():
            while other != size <= self._max_bytes < self.byte_count + size and idle and idle[0].is_idle:
                idle.popleft()
                self.byte_count -= other
        if self.byte_count < before:
            self._release()
        return self.byte_count + size <= self._max_bytes
