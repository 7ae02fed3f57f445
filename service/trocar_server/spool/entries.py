"""What is saved: blocks of bytes, each once, and where they are at present."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from trocar_server.spool.transfer import Place


class State(Enum):
    """Where the bytes of a block are."""

    HELD = auto()
    """In memory alone."""
    QUEUED = auto()
    """In memory, to be written."""
    WRITING = auto()
    """In memory, being written."""
    STORED = auto()
    """On disk alone."""
    READING = auto()
    """On disk, being read."""
    LOADED = auto()
    """On disk, and in memory again."""
    GONE = auto()
    """Nobody needs it any more."""


@dataclass(eq=False, slots=True)
class Block:
    """The bytes of one storage, or of a small part of one, at one version.

    Attributes:
        number: Counts up in the order of saving.
        byte_count: Its size.
        dtype: What its elements are.
        key: By which it is found again while somebody needs it.
        origin: The storage that was saved, without keeping its memory: as long as this lives, no other
            storage gets its address, which is a part of the key.
        storage: The bytes, where they are in memory.
        ready: Waits until they are there, where they are copied from a device; None where they are.
        state: Where the bytes are.
        users: Saved tensors that need it.
        generation: Counts forks: blocks of the parent process are not managed in its child.
        place: Where it is on disk.
        pass_number: In which backward pass it was read.
    """

    number: int
    byte_count: int
    dtype: torch.dtype
    key: Hashable
    origin: StorageWeakRef
    storage: torch.UntypedStorage | None
    state: State = State.HELD
    users: int = 1
    generation: int = 0
    place: Place | None = None
    pass_number: int = 0
    ready: Callable[[], None] | None = None
