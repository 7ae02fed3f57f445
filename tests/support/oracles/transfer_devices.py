"""A device in host memory whose copies are done late: when the test says so, or when somebody waits.

It promises what `CopyBackend` says and no more: until a copy is done its target holds rubbish, and what the
source then holds is what is copied. Whoever reads too early, or writes into a source, gets wrong bytes.
"""

import threading
from collections import deque
from dataclasses import dataclass, field

import torch

from trocar_server.engine.transfer import StreamTransfers

WAIT_S = 60
RUBBISH = 0xA5


@dataclass(eq=False)
class LateCopy:
    """A copy that is not done, and the event that says when it is."""

    backend: "LateBackend"
    target: torch.Tensor
    source: torch.Tensor
    ended: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def query(self) -> bool:
        return self.ended.is_set()

    def synchronize(self) -> None:
        if not self.backend.is_held:
            self.backend.finish_until(self)
        assert self.ended.wait(WAIT_S)
        if self.error is not None:
            raise self.error


@dataclass(eq=False)
class LateBackend:
    """See the module.

    Attributes:
        is_held: Whether copies to the host are done when `finish` is called; when somebody waits, otherwise.
        begun_count: Copies to the host so far.
        upload_count: Copies to the device so far.
        allocated: The sizes of the pieces of page-locked memory, in bytes.
        released_count: How often page-locked memory was let go.
    """

    is_held: bool = False
    begun_count: int = 0
    upload_count: int = 0
    allocated: list[int] = field(default_factory=list)
    released_count: int = 0
    _down: deque[LateCopy] = field(default_factory=deque)
    _up: deque[LateCopy] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def allocate(self, byte_count: int) -> torch.Tensor:
        self.allocated.append(byte_count)
        return torch.full((byte_count,), RUBBISH, dtype=torch.uint8)

    def release(self) -> None:
        self.released_count += 1

    def download(self, target: torch.Tensor, source: torch.Tensor) -> LateCopy:
        target.fill_(RUBBISH)
        with self._changed:
            copy = LateCopy(self, target, source)
            self._down.append(copy)
            self.begun_count += 1
            self._changed.notify_all()
        return copy

    def room(self, like: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(like)
        found.view(-1).view(torch.uint8).fill_(RUBBISH)
        return found

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> LateCopy:
        self.upload_count += 1
        copy = LateCopy(self, target, source)
        self._up.append(copy)
        return copy

    def hand_over(self, target: torch.Tensor, event: object) -> None:
        assert isinstance(event, LateCopy)
        while not event.query():
            _do(self._up.popleft())

    def synchronize(self) -> None:
        pass

    def until_begun(self, count: int) -> None:
        """Wait until so many copies to the host have begun; not on the event loop."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.begun_count >= count, WAIT_S)

    def finish(self, count: int = 1, error: Exception | None = None) -> None:
        """End the copies to the host that began first, with an error if there is one."""
        with self._changed:
            for _ in range(count):
                _do(self._down.popleft(), error)

    def finish_until(self, copy: LateCopy) -> None:
        """End copies to the host until this one is done."""
        with self._changed:
            while not copy.query():
                _do(self._down.popleft())


def late_transfers(
    backend: LateBackend, max_bytes: int = 1 << 30, device: torch.device | None = None
) -> StreamTransfers:
    """Return transfers that take host memory for the device's, and copy everything."""
    return StreamTransfers(device or torch.device("cpu"), backend, max_bytes, least_bytes=1)


def _do(copy: LateCopy, error: Exception | None = None) -> None:
    copy.error = error
    if error is None:
        with torch.inference_mode():
            copy.target.copy_(copy.source)
    copy.ended.set()
