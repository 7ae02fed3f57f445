"""What autograd holds in the place of a tensor; each gives the tensor back, or raises as torch would.

# Note: [A version without its tensor]
Under saved-tensor hooks torch does not compare versions: a tensor changed in place after it was saved gives
wrong gradients without an error. So they are compared here. A detached tensor shares the version counter of
its origin, and keeps it when its data is replaced (torch 2.14). So it stands for the origin without holding
its memory. What is given back shares the counter, too: who changes a saved tensor within backward changes its
version, as without a spool.
"""

from typing import TYPE_CHECKING

import torch

from trocar_server.spool.errors import SavedTensorChangedError

if TYPE_CHECKING:
    from trocar_server.spool.device_tier import DeviceTier
    from trocar_server.spool.entries import Block
    from trocar_server.spool.store import BlockStore
    from trocar_server.spool.views import View

_NOTHING: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


class VersionWatch:
    """Knows which version a tensor had, and has now; see Note: [A version without its tensor]."""

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
        found = self._shadow.detach()
        found.data = tensor
        return found


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

    def __init__(self, storage: torch.UntypedStorage, view: "View", watch: VersionWatch) -> None:
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

    __slots__ = ("_block", "_store", "_view", "_watch")

    def __init__(
        self, store: "BlockStore | DeviceTier", block: "Block", view: "View", watch: VersionWatch
    ) -> None:
        self._store, self._block, self._view, self._watch = store, block, view, watch

    def __del__(self) -> None:
        self._store.release(self._block)

    def unpack(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            SavedTensorChangedError: It was changed in place since.
            SpoolError: It cannot be brought back from disk.
        """
        self._watch.check(self._view.shape)
        return self._watch.counted(self._view.tensor(self._store.get(self._block)))


Packed = Kept | Copied | Saved
"""What autograd holds in the place of a tensor."""


def changed(
    shape: tuple[int, ...], dtype: torch.dtype, version: int, expected: int
) -> SavedTensorChangedError:
    """Return the error for a tensor that was changed in place, in torch's words."""
    return SavedTensorChangedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(shape)}] is at version {version}; expected version {expected} instead"
    )
