"""A device in host memory: copies to and from it are done late, some when others begin or somebody waits.

It promises what `Copier` says and no more: until a copy is done its target holds rubbish, and the source of a
copy to the host must be alive then. Whoever waits too little gets wrong numbers or a note in `failures`.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from trocar_server.spool import spool as spool_module


@dataclass(eq=False)
class LateCopy:
    """A copy that is not done, and the event that says when it is."""

    copier: "LateCopier"
    source: torch.UntypedStorage | StorageWeakRef
    target: torch.UntypedStorage
    kind: str
    is_done: bool = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.copier.run_until(self)


@dataclass(eq=False)
class LateCopier:
    """See the module.

    Attributes:
        failures: Copies that found no source.
        log: What was begun: a kind and a size.
        most_leaving_bytes: The most bytes that were on their way to the host at once.
        lag_count: The most copies that are not done.
    """

    failures: list[str] = field(default_factory=list)
    log: list[tuple[str, int]] = field(default_factory=list)
    most_leaving_bytes: int = 0
    lag_count: int = 3
    _pending: deque[LateCopy] = field(default_factory=deque)
    _pinned: dict[int, StorageWeakRef] = field(default_factory=dict)
    # Reentrant: the garbage collector may come here while its thread is here.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def to_host(self, source: torch.UntypedStorage) -> tuple[torch.UntypedStorage, LateCopy]:
        host = _rubbish(source.nbytes(), 0xA5)
        with self._lock:
            self._pinned[host._cdata] = StorageWeakRef(host)  # keeps the address from being used again
            return host, self._begin(LateCopy(self, StorageWeakRef(source), host, "down"))

    def to_device(self, source: torch.UntypedStorage) -> tuple[torch.UntypedStorage, LateCopy]:
        with self._lock:
            kept = source if source._cdata in self._pinned else source.clone()
            target = _rubbish(source.nbytes(), 0x5A)
            return target, self._begin(LateCopy(self, kept, target, "up"))

    def hand_over(self, storage: torch.UntypedStorage, event: object) -> None:
        assert isinstance(event, LateCopy)
        assert event.target._cdata == storage._cdata
        event.synchronize()

    def run(self, count: int = 1) -> None:
        """Do the copies that were begun first."""
        with self._lock:
            for _ in range(min(max(count, 0), len(self._pending))):
                self._do(self._pending.popleft())

    def run_until(self, copy: LateCopy) -> None:
        """Do copies until one is done."""
        with self._lock:
            while not copy.is_done:
                self._do(self._pending.popleft())

    def _begin(self, copy: LateCopy) -> LateCopy:
        self._pending.append(copy)
        self.log.append((copy.kind, copy.target.nbytes()))
        leaving = sum(pending.target.nbytes() for pending in self._pending if pending.kind == "down")
        self.most_leaving_bytes = max(self.most_leaving_bytes, leaving)
        self.run(len(self._pending) - self.lag_count)
        return copy

    def _do(self, copy: LateCopy) -> None:
        source: torch.UntypedStorage | None
        if isinstance(copy.source, StorageWeakRef):
            source = torch.UntypedStorage._new_with_weak_ptr(copy.source.cdata)
        else:
            source = copy.source
        if source is None:
            self.failures.append(f"a source of {copy.target.nbytes()} bytes was gone before it was copied")
        else:
            copy.target.copy_(source)
        copy.is_done = True


@contextmanager
def all_tensors_on_a_device() -> Iterator[LateCopier]:
    """Spools that are made here take host memory for a device's."""
    copier = LateCopier()
    with patch.object(spool_module, "copier_of", lambda _: copier):
        yield copier
    if copier.failures:
        raise AssertionError(copier.failures[0])


def _rubbish(byte_count: int, value: int) -> torch.UntypedStorage:
    return torch.full((byte_count,), value, dtype=torch.uint8).untyped_storage()
