"""The pair of hooks that autograd calls: which tensors go to the store, and what autograd holds instead."""

import threading
from collections.abc import Hashable, Iterable

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from trocar_server.spool.choice import Choice
from trocar_server.spool.device_tier import DeviceTier, Tiers
from trocar_server.spool.saved import Copied, Kept, Packed, Saved, VersionWatch
from trocar_server.spool.store import BlockStore
from trocar_server.spool.views import View, small_part

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue] - no stub


class Packer:
    """Packs the tensors that autograd saves. For any thread.

    Args:
        tiers: Take what may be written.
        min_bytes: Smaller tensors stay in memory.
        choose: Says which tensors may be written; all that can be when None.
        tells_dtypes: Whether bytes that are seen as two dtypes are two blocks.

    Attributes:
        saved_bytes: Of all tensors that were packed.
        kept_bytes: Of those that always stay.
    """

    def __init__(
        self, tiers: Tiers, min_bytes: int, choose: Choice | None = None, tells_dtypes: bool = False
    ) -> None:
        self.saved_bytes = self.kept_bytes = 0
        self._tiers, self._min_bytes, self._choose = tiers, min_bytes, choose
        self._tells_dtypes = tells_dtypes
        self._counting = threading.Lock()
        self._kept: dict[
            int, StorageWeakRef
        ] = {}  # the references keep their addresses from being used again

    def keep(self, entries: Iterable[nn.Module | torch.Tensor]) -> None:
        """Never write the memory that these tensors, parameters and buffers have at present."""
        kept = dict(self._kept)
        for storage in _storages(entries):
            kept[storage._cdata] = StorageWeakRef(storage)
        self._kept = {address: known for address, known in kept.items() if not known.expired()}

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Take a tensor that autograd saves; returns what it holds instead.

        Raises:
            SpoolError: The disk fails, or the spool is closed.
        """
        home = self._tiers.home_of(tensor.device) if _is_plain(tensor) else None
        byte_count = tensor.nbytes if home is not None or type(tensor) is nn.Parameter else 0
        storage = tensor.untyped_storage() if home is not None and byte_count else None
        if home is None or storage is None or self._stays(tensor, storage):
            self._count(byte_count, byte_count)
            return Kept(tensor)
        self._count(byte_count, byte_count if byte_count < self._min_bytes else 0)
        if byte_count >= self._min_bytes:
            return self._saved(home, tensor, storage)
        if storage.nbytes() > max(2 * byte_count, self._min_bytes):
            view = View.of(tensor)
            part = small_part(view, storage)
            if part is not None:
                return Copied(part.copy(), part.view, VersionWatch(tensor))
        return Kept(tensor)

    def _saved(
        self, store: BlockStore | DeviceTier, tensor: torch.Tensor, storage: torch.UntypedStorage
    ) -> Saved:
        watch, view = VersionWatch(tensor), View.of(tensor)
        key: Hashable = (storage._cdata, tensor._version, tensor.dtype if self._tells_dtypes else None)
        whole_bytes = storage.nbytes()
        part = small_part(view, storage) if tensor.nbytes != whole_bytes else None
        if part is None:
            return Saved(store, store.save(key, storage, whole_bytes, tensor.dtype), view, watch)
        block = store.find(key)  # all of it is there anyway
        if block is not None:
            return Saved(store, block, view, watch)
        block = store.save((key, *part.where), storage, part.byte_count, tensor.dtype, part.copy)
        return Saved(store, block, part.view, watch)

    def _stays(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        if tensor.requires_grad and tensor.is_leaf:
            return True
        base = tensor._base
        if base is not None and (isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)):
            return True
        if storage._cdata in self._kept:
            return True
        return self._choose is not None and not self._choose(tensor)

    def _count(self, saved_bytes: int, kept_bytes: int) -> None:
        with self._counting:
            self.saved_bytes += saved_bytes
            self.kept_bytes += kept_bytes


def unpack(saved: Packed) -> torch.Tensor:
    """Return the tensor for which `Packer.pack` gave this.

    Raises:
        SavedTensorChangedError: It was changed in place since.
        SpoolError: It cannot be brought back from disk.
    """
    return saved.unpack()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but elements in the memory of one device."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor._is_zerotensor() or _is_wrapped(tensor))
    )


def _storages(entries: Iterable[nn.Module | torch.Tensor]) -> Iterable[torch.UntypedStorage]:
    for entry in entries:
        tensors = [entry] if isinstance(entry, torch.Tensor) else [*entry.parameters(), *entry.buffers()]
        for tensor in tensors:
            if tensor.layout is torch.strided and not tensor.is_nested:
                yield tensor.untyped_storage()
