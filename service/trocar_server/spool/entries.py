"""What is saved: blocks of bytes, each once, and the tensors that autograd made of them."""

from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from trocar_server.spool.errors import SavedTensorChangedError
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


IN_MEMORY = (State.HELD, State.QUEUED, State.WRITING)


@dataclass(eq=False)
class Block:
    """The bytes of one storage, or of a small part of one, at one version.

    Attributes:
        number: Counts up in the order of saving.
        byte_count: Its size.
        dtype: What its elements are.
        key: By which it is found again while the storage lives.
        alive: Whether that storage lives.
        storage: The bytes, where they are in memory.
        start: Where the block begins in `storage`, in bytes; not 0 where it was read back.
        users: Saved tensors that need it.
        generation: Counts forks: blocks of the parent process are not managed in its child.
        place: Where it is on disk.
        error: What came of reading it.
    """

    number: int
    byte_count: int
    dtype: torch.dtype
    key: tuple[object, ...]
    alive: StorageWeakRef
    storage: torch.UntypedStorage | None
    state: State = State.HELD
    start: int = 0
    users: int = 0
    generation: int = 0
    place: Place | None = None
    error: BaseException | None = None


class VersionWatch:
    """Says whether a tensor was changed in place since, without keeping its memory.

    # Note: [A version without its tensor]
    Under saved-tensor hooks torch does not compare versions (DESIGN 5.5). A detached tensor shares the
    version counter of its origin, and keeps it when its data is replaced by nothing (torch 2.14).
    """

    __slots__ = ("_shadow", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = tensor._version
        self._shadow = tensor.detach()
        self._shadow.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise as torch would.

        Raises:
            SavedTensorChangedError: The tensor was changed.
        """
        if self._shadow._version != self._version:
            raise SavedTensorChangedError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {shape} is at version {self._shadow._version}; expected version "
                f"{self._version} instead"
            )


@dataclass
class View:
    """How a tensor lies in its block: sizes, strides and the offset of its first element."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conjugate: bool = False
    is_negative: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "View":
        """Describe a tensor within its storage."""
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def tensor(self, storage: torch.UntypedStorage, start: int = 0) -> torch.Tensor:
        """Return the tensor in a storage in which its block begins at byte `start`."""
        offset = start // self.dtype.itemsize + self.offset
        found = torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, offset, self.shape, self.strides
        )
        if self.is_conjugate:
            found = torch._C._conj(found) if hasattr(torch._C, "_conj") else found.conj()
        return torch._neg_view(found) if self.is_negative else found


@dataclass(eq=False)
class Kept:
    """A saved tensor that stays where it is: a parameter, or too small to matter."""

    tensor: torch.Tensor
    version: int

    def unpack(self) -> torch.Tensor:
        """Return it.

        Raises:
            SavedTensorChangedError: It was changed in place since.
        """
        if self.tensor._version != self.version:
            raise SavedTensorChangedError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(self.tensor.shape)} is at version {self.tensor._version}; expected "
                f"version {self.version} instead"
            )
        return self.tensor
