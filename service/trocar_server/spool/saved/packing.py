"""Pack and unpack hooks: the tensors that go to the store, and the handles that autograd keeps instead.

# Note: [Where changes are allowed]
Inside `torch.autograd.graph.allow_mutation_on_saved_tensors` a tensor may be changed after it was saved, and
backward uses what it was. torch copies it right before the change, but knows only what its own hooks have
taken. So there a spool keeps copies of what it takes, each once for a version, and gives torch's hooks what
it leaves in memory.
"""

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from trocar_server.spool.blocks.block_store import BlockStore
from trocar_server.spool.blocks.device_tier import DeviceTier, Tiers
from trocar_server.spool.files.entries import Label
from trocar_server.spool.saved.choice import Choice
from trocar_server.spool.saved.codec import Codec, Coded, SavedCoded
from trocar_server.spool.saved.saved import Copied, Kept, Lent, NoWatch, Packed, Saved, VersionWatch, Watch
from trocar_server.spool.saved.views import View, copied_bytes, small_part

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue] - no stub


class Packer:
    """Packs the tensors that autograd saves. Thread-safe.

    Args:
        tiers: Take what may be written.
        min_bytes: Smaller tensors stay in memory.
        choose: Says which tensors may be written; all that can be when None.
        tells_dtypes: Whether bytes that are seen as two dtypes are two blocks.
        codec: Encodes the tensors that may be written.

    Attributes:
        saved_bytes: Of all tensors that were packed.
        kept_bytes: Of those that always stay.
    """

    def __init__(
        self,
        tiers: Tiers,
        min_bytes: int,
        choose: Choice | None = None,
        tells_dtypes: bool = False,
        codec: Codec | None = None,
    ) -> None:
        self.saved_bytes = self.kept_bytes = 0
        self.tiers, self._min_bytes, self._choose = tiers, min_bytes, choose
        self._tells_dtypes, self._codec = tells_dtypes, codec
        self.coded: WeakValueDictionary[Hashable, Coded] = WeakValueDictionary()
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

    def hooks(self) -> saved_tensors_hooks:
        """Return the pair of hooks for this thread as it is at present, for one context."""
        mutable = _mutable_around()
        pack = self.pack if mutable is None else PackMutable(self, mutable)
        return saved_tensors_hooks(pack, unpack)

    def pack(self, tensor: torch.Tensor, mutable: "Mutable | None" = None) -> Packed | SavedCoded:
        """Pack a tensor that autograd saves; returns the handle that it keeps instead.

        Args:
            tensor: What autograd saves.
            mutable: Keeps tensors that stay, inside `allow_mutation_on_saved_tensors`; None elsewhere.

        Raises:
            SpoolError: The disk fails, or the spool is closed.
        """
        home = self.tiers.home_of(tensor.device) if _is_plain(tensor) else None
        byte_count = tensor.nbytes if home is not None or type(tensor) is nn.Parameter else 0
        storage = tensor.untyped_storage() if home is not None and byte_count else None
        if home is None or storage is None or self._stays(tensor):
            self._count(byte_count, byte_count)
            return _kept(tensor, mutable)
        self._count(byte_count, byte_count if byte_count < self._min_bytes else 0)
        if byte_count < self._min_bytes:
            return self._small(tensor, storage, mutable)
        if self.tiers.stays(storage):
            self._count(0, byte_count)
            return _kept(tensor, mutable)
        if self._codec is not None:
            return self._by_codec(self._codec, tensor, storage, mutable)
        return self._saved(home, tensor, storage, mutable)

    def _small(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, mutable: "Mutable | None"
    ) -> Packed:
        if storage.nbytes() > max(2 * tensor.nbytes, self._min_bytes):
            part = small_part(View.of(tensor), storage)
            if part is not None:
                return Copied(part.copy(), part.view, _watch(tensor, mutable))
        return _kept(tensor, mutable)

    def _saved(
        self,
        store: BlockStore | DeviceTier,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        mutable: "Mutable | None",
    ) -> Saved:
        if mutable is not None:
            return self._copied(store, tensor, storage)
        watch, view = VersionWatch(tensor), View.of(tensor)
        key: Hashable = (storage._cdata, tensor._version, tensor.dtype if self._tells_dtypes else None)
        whole_bytes = storage.nbytes()
        part = small_part(view, storage) if tensor.nbytes != whole_bytes else None
        if part is None:
            label = Label.of(tensor, whole_bytes)
            return Saved(store, store.save(key, storage, whole_bytes, tensor.dtype, label=label), view, watch)
        block = store.find(key)  # all of it is there anyway
        if block is not None:
            return Saved(store, block, view, watch)
        label = Label.of(tensor, part.byte_count)
        block = store.save((key, *part.where), storage, part.byte_count, tensor.dtype, part.copy, label=label)
        return Saved(store, block, part.view, watch)

    def _copied(
        self, store: BlockStore | DeviceTier, tensor: torch.Tensor, storage: torch.UntypedStorage
    ) -> Saved:
        """Save a copy of a tensor that may be changed; see Note: [Where changes are allowed]."""
        view, whole_bytes = View.of(tensor), storage.nbytes()
        part = small_part(view, storage) if tensor.nbytes != whole_bytes else None
        what = tensor.dtype if self._tells_dtypes else None, None if part is None else part.where
        key = CopyKey(storage._cdata, (tensor._version, *what), StorageWeakRef(storage))
        block = store.find(key)
        if block is None:
            copy = copied_bytes(storage, 0, whole_bytes) if part is None else part.copy()
            label = Label.of(tensor, copy.nbytes())
            block = store.save(key, copy, copy.nbytes(), tensor.dtype, label=label)
        return Saved(store, block, view if part is None else part.view, NoWatch())

    # --- What a codec made -------------------------------------------------------------------------

    def _by_codec(
        self, codec: Codec, tensor: torch.Tensor, storage: torch.UntypedStorage, mutable: "Mutable | None"
    ) -> SavedCoded:
        """Save what a codec makes of a tensor, once for all who save it at this version."""
        watch = _watch(tensor, mutable)
        key = storage._cdata, tensor._version, View.of(tensor)
        coded = self.coded.get(key)
        if coded is None:
            made = codec.pack(tensor.detach())  # an output would hold its graph
            coded = Coded(self._packed_parts(made, mutable), StorageWeakRef(storage))
            self.coded[key] = coded
        return SavedCoded(codec, coded, tensor, watch)

    def _packed_parts(self, made: Any, mutable: "Mutable | None") -> Any:
        if type(made) is tuple:
            return tuple(self._packed_parts(entry, mutable) for entry in made)
        return self._packed_part(made, mutable) if isinstance(made, torch.Tensor) else made

    def _packed_part(self, part: torch.Tensor, mutable: "Mutable | None") -> Packed:
        home = self.tiers.home_of(part.device) if _is_plain(part) else None
        if home is None or part.nbytes < self._min_bytes or not part.nbytes or self._is_kept(part):
            return _kept(part, mutable)
        return self._saved(home, part, part.untyped_storage(), mutable)

    def _stays(self, tensor: torch.Tensor) -> bool:
        return self._is_kept(tensor) or (self._choose is not None and not self._choose(tensor))

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter, a view of one, or in the memory of `keep`."""
        if tensor.requires_grad and tensor.is_leaf:
            return True
        base = tensor._base
        if base is not None and (isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)):
            return True
        return tensor.untyped_storage()._cdata in self._kept

    def renew_locks(self) -> None:
        """In a forked process: replace the locks, which other threads of the parent may have held."""
        self._counting = threading.Lock()
        self.tiers.renew_locks()

    def _count(self, saved_bytes: int, kept_bytes: int) -> None:
        with self._counting:
            self.saved_bytes += saved_bytes
            self.kept_bytes += kept_bytes


@dataclass(frozen=True)
class Mutable:
    """The hooks of `allow_mutation_on_saved_tensors`."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class PackMutable:
    """The pack hook of a spool inside `allow_mutation_on_saved_tensors`."""

    packer: Packer
    mutable: Mutable

    def __call__(self, tensor: torch.Tensor) -> Packed | SavedCoded:
        """See `Packer.pack`."""
        return self.packer.pack(tensor, self.mutable)


@dataclass(frozen=True)
class CopyKey:
    """Lookup key of a copy: the address of its origin, which is not reused meanwhile."""

    address: int
    what: tuple[object, ...]
    origin: StorageWeakRef = field(compare=False)


def _mutable_around() -> Mutable | None:
    """Return the hooks of `allow_mutation_on_saved_tensors` where this thread is in it."""
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined, unused-ignore]
    top = autograd._top_saved_tensors_default_hooks(True)
    if top is None:
        return None
    pack, unpack_ = top
    if isinstance(pack, PackMutable):
        return pack.mutable
    is_torchs = getattr(pack, "__qualname__", "").startswith("_swap_with_cloned.")
    return Mutable(pack, unpack_) if is_torchs else None


def _kept(tensor: torch.Tensor, mutable: Mutable | None) -> Packed:
    return Kept(tensor) if mutable is None else Lent(tensor, mutable.pack, mutable.unpack)


def _watch(tensor: torch.Tensor, mutable: Mutable | None) -> Watch:
    return VersionWatch(tensor) if mutable is None else NoWatch()


def unpack(saved: Packed | SavedCoded) -> torch.Tensor:
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
