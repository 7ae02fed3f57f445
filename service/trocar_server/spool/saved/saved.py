"""Handles that autograd keeps in place of tensors; each returns its tensor, or raises as torch would.

# Note: [Version counter of a freed tensor]
Under saved-tensor hooks torch does not compare versions: a tensor changed in place after it was saved gives
wrong gradients without an error. So they are compared here. A detached tensor shares the version counter of
its origin, and keeps it when its data is replaced (torch 2.14). So it stands for the origin without holding
its memory. An unpacked tensor shares the counter, too: changing it in place within backward changes its
version, as without a spool.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from trocar_server.spool.spool_errors import SavedTensorChangedError

if TYPE_CHECKING:
    from trocar_server.spool.blocks.block_store import BlockStore
    from trocar_server.spool.blocks.device_tier import DeviceTier
    from trocar_server.spool.files.entries import Block
    from trocar_server.spool.saved.views import View

Unpack = Callable[[Any], torch.Tensor]

_NOTHING: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


class VersionWatch:
    """A tensor's version when saved, and now; see Note: [Version counter of a freed tensor]."""

    __slots__ = ("_shadow", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = tensor._version
        self._shadow = tensor.detach()
        kind = tensor.dtype, tensor.device
        nothing = _NOTHING.get(kind)
        if nothing is None:
            nothing = _NOTHING[kind] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._shadow.data = nothing

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise as torch would.

        Raises:
            SavedTensorChangedError: The tensor was changed in place.
        """
        if self._shadow._version != self._version:
            raise changed(shape, self._shadow.dtype, self._shadow._version, self._version)

    def counted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the same data that shares the version counter."""
        result = self._shadow.detach()
        result.data = tensor
        return result


class NoWatch:
    """No version check, for a private copy."""

    def check(self, shape: tuple[int, ...]) -> None:
        """Accept every change of the origin."""

    def counted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor


Watch = VersionWatch | NoWatch


class Kept:
    """A saved tensor that stays where it is: a parameter, or too small to matter."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # An output would hold its graph, and the graph the output. A leaf has none; torch, too, saves the
        # leaf itself, and sees it when its data is replaced.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        """Return it.

        Raises:
            SavedTensorChangedError: It was changed in place since.
        """
        if self._tensor._version != self._version:
            raise changed(tuple(self._tensor.shape), self._tensor.dtype, self._tensor._version, self._version)
        return self._tensor


class Copied:
    """A saved tensor too small to be written, copied because it is a part of a large storage."""

    __slots__ = ("_storage", "_view", "_watch")

    def __init__(self, storage: torch.UntypedStorage, view: "View", watch: Watch) -> None:
        self._storage, self._view, self._watch = storage, view, watch

    def unpack(self) -> torch.Tensor:
        """Return it.

        Raises:
            SavedTensorChangedError: It was changed in place since.
        """
        self._watch.check(self._view.shape)
        return self._watch.counted(self._view.tensor(self._storage))


class Saved:
    """A saved tensor whose bytes are in a block."""

    __slots__ = ("_store", "_view", "_watch", "block")

    def __init__(self, store: "BlockStore | DeviceTier", block: "Block", view: "View", watch: Watch) -> None:
        self._store, self.block, self._view, self._watch = store, block, view, watch

    def __del__(self) -> None:
        self._store.release(self.block)

    def unpack(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            SavedTensorChangedError: It was changed in place since.
            SpoolError: It cannot be brought back from disk.
        """
        self._watch.check(self._view.shape)
        return self._watch.counted(self._view.tensor(self._store.get(self.block)))


class Lent:
    """A saved tensor that stays where it is, inside `allow_mutation_on_saved_tensors`.

    torch keeps it, and copies it before it is changed. What torch does not see, a change through a view that
    begins elsewhere (2.14), raises.
    """

    __slots__ = ("_address", "_handle", "_unpack", "_watch")

    def __init__(self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Any], unpack: Unpack) -> None:
        self._watch, self._address = VersionWatch(tensor), tensor.data_ptr()
        self._handle, self._unpack = pack(tensor), unpack

    def unpack(self) -> torch.Tensor:
        """Return it, as it was.

        Raises:
            SavedTensorChangedError: It was changed in place, unseen by torch.
        """
        result = self._unpack(self._handle)
        if result.data_ptr() == self._address:
            self._watch.check(tuple(result.shape))
        return result


Packed = Kept | Copied | Saved | Lent
"""A handle in place of a tensor."""


def changed(
    shape: tuple[int, ...], dtype: torch.dtype, version: int, expected: int
) -> SavedTensorChangedError:
    """Return the error for a tensor that was changed in place, in torch's words."""
    return SavedTensorChangedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(shape)}] is at version {version}; expected version {expected} instead"
    )
