"""Pinned memory pool: page-locked host memory within a bound.

Page-locking takes milliseconds for each piece, and no other process can use the memory: so pieces are
reused, and at the bound callers copy without one.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from trocar_server.engine.request.plan import Payload

_LEAST_PIECE_BYTES = 64 << 10


class CopyEvent(Protocol):
    """The end of a copy, like `torch.cuda.Event`."""

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
        memory: A uint8 tensor; its size is a power of two.
        event: The last copy from or to it; None before the first use.
    """

    memory: torch.Tensor
    event: CopyEvent | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no copy uses it."""
        return self.event is None or self.event.query()


class PinnedPool:
    """Pool of page-locked memory. Owner thread only, except where stated.

        piece = pool.take(100_000)          # None: no room
        piece.event = begin_copy(piece.memory)
        payload = pool.lend(piece, 100_000) # returned when the payload is garbage-collected

    A returned piece is reused only when its copy is done too: so a reply may be dropped while its copy is
    running.

    Args:
        max_bytes: The most memory of all pieces, idle ones included; 0 disables the pool.
        allocate: Allocates page-locked memory of this many bytes.
        release: Called when pieces were dropped, so that their memory is not cached.
    """

    def __init__(
        self, max_bytes: int, allocate: Callable[[int], torch.Tensor], release: Callable[[], None]
    ) -> None:
        self._max_bytes = max_bytes
        self._allocate = allocate
        self._release = release
        self.byte_count = 0
        self._idle: dict[int, deque[Piece]] = {}
        """Idle pieces by size, the one returned first in front."""
        # A finaliser may run on any thread at any point: it touches only this, which needs no lock.
        self._returned: deque[Piece] = deque()

    def take(self, byte_count: int) -> Piece | None:
        """Return an idle piece of at least this size; None where the bound leaves no room."""
        self._sort_returned()
        size = max(_LEAST_PIECE_BYTES, 1 << (byte_count - 1).bit_length())
        idle = self._idle.get(size)
        if idle and idle[0].is_idle:
            return idle.popleft()
        if not self._has_room_for(size):
            return None
        try:
            # Never an inference tensor, in any mode: such a tensor could not be written later.
            with torch.inference_mode(False):
                memory = self._allocate(size)
        except RuntimeError:  # the system locks no more pages: this is the bound from now on
            self._max_bytes = self.byte_count
            return None
        self.byte_count += size
        return Piece(memory)

    def lend(self, piece: Piece, byte_count: int) -> Payload:
        """Return the first bytes of a piece; it is returned when these and all views of them are gone."""
        # Views of an array keep this very object alive, since it does not own its memory (NumPy's `base`).
        whole = piece.memory.numpy()
        weakref.finalize(whole, self._returned.append, piece).atexit = False
        return whole[:byte_count]

    def give_back(self, piece: Piece) -> None:
        """Return an unused piece to the pool; on any thread."""
        self._returned.append(piece)

    def _sort_returned(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            self._idle.setdefault(piece.memory.nbytes, deque()).append(piece)

    def _has_room_for(self, size: int) -> bool:
        """Whether there is room, if need be by dropping idle pieces of other sizes."""
        before = self.byte_count
        for other, idle in self._idle.items():
            while other != size <= self._max_bytes < self.byte_count + size and idle and idle[0].is_idle:
                idle.popleft()
                self.byte_count -= other
        if self.byte_count < before:
            self._release()
        return self.byte_count + size <= self._max_bytes
