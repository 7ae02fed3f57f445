"""Which of two settings the C allocator has: for serving, or for training with a spool.

Passes without gradients are faster when freed memory is kept; a spool saves memory only when it goes back. So
while any trainer has a spool it goes back, and afterwards it is as it was.
"""

from threading import Lock

from trocar_server.engine.allocator import is_kept, keep_freed_memory
from trocar_server.spool.allocator import return_freed_memory


class AllocatorMode:
    """Counts who needs freed memory to go back; there is one for the process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._count = 0
        self._was_kept = False

    def begin(self) -> None:
        """Count one more trainer with a spool."""
        with self._lock:
            if not self._count:
                self._was_kept = is_kept()
                return_freed_memory()
            self._count += 1

    def end(self) -> None:
        """Count one less."""
        with self._lock:
            self._count -= 1
            if not self._count and self._was_kept:
                keep_freed_memory()


SPOOLING = AllocatorMode()
