"""Entries: saved blocks of bytes, each stored once, with their present location."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from trocar_server.spool.files.block_transfer import Place


class EntryState(Enum):
    """Location of the bytes of a block."""

    HELD = auto()
    """In memory only."""
    QUEUED = auto()
    """In memory, to be written."""
    WRITING = auto()
    """In memory, being written."""
    STORED = auto()
    """On disk only."""
    READING = auto()
    """On disk, being read."""
    LOADED = auto()
    """On disk, and in memory again."""
    GONE = auto()
    """No references left."""


@dataclass(frozen=True, slots=True)
class Label:
    """Description of a block, for readers of its file.

    Attributes:
        made: The operation that made the tensor, as `grad_fn.name()` has it; empty where none did.
        shape: Of the tensor, where it is the block, row by row.
    """

    made: str = ""
    shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, block_bytes: int) -> "Label":
        """Describe a tensor that is stored in a block."""
        made = tensor.grad_fn
        is_block = tensor.nbytes == block_bytes and tensor.is_contiguous()
        return cls("" if made is None else made.name(), tuple(tensor.shape) if is_block else None)


@dataclass(eq=False, slots=True)
class Block:
    """The bytes of one storage, or of a small part of one, at one version.

    Attributes:
        number: Counts up in the order of saving.
        byte_count: Its size.
        dtype: Of its elements.
        key: Its lookup key while it has references.
        origin: The storage that was saved, without keeping its memory: as long as this lives, no other
            storage gets its address, which is a part of the key.
        storage: The bytes, where they are in memory.
        label: Description for readers of its file.
        step: The step in which it was saved.
        ready: Waits until the bytes are copied from a device; None where they are complete.
        state: Location of the bytes.
        users: Number of saved tensors that refer to it.
        generation: Counts forks: blocks of the parent process are not managed in its child.
        place: Where it is on disk.
        pass_number: The backward pass in which it was read.
    """

    number: int
    byte_count: int
    dtype: torch.dtype
    key: Hashable
    origin: StorageWeakRef
    storage: torch.UntypedStorage | None
    state: EntryState = EntryState.HELD
    users: int = 1
    generation: int = 0
    place: Place | None = None
    pass_number: int = 0
    ready: Callable[[], None] | None = None
    label: Label = field(default_factory=Label)
    step: int = 0
