"""Saved tensors on disk: what autograd keeps for the backward pass, within a memory budget.

    spool = Spool("/scratch", budget_bytes=256 << 20)
    with spool:
        loss = criterion(model(x), y)
    loss.backward()

See `store` for what is written and when, and `chunks` for the files.
"""

import threading
import weakref
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from trocar_server.spool.choice import Choice, all_of, made_by
from trocar_server.spool.encoding import EncodingOptions, StoreDtype
from trocar_server.spool.entries import Block, Kept, VersionWatch, View
from trocar_server.spool.options import DiskOptions
from trocar_server.spool.report import Report
from trocar_server.spool.store import BlockStore

MIN_BYTES = 32 << 10
AHEAD_BYTES = 64 << 20
_COMPACT_SHARE = 2


class Saved:
    """What autograd holds instead of a tensor."""

    __slots__ = ("__weakref__", "_block", "_store", "_view", "_watch")

    def __init__(self, store: BlockStore, block: Block, view: View, watch: VersionWatch) -> None:
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
        storage, start = self._store.get(self._block)
        return self._view.tensor(storage, start)


class Spool(AbstractContextManager["Spool"]):
    """Keeps what autograd saves within a budget of memory, and the rest on disk.

    A context, to be entered for every forward pass, also in several threads at once: hooks of saved tensors
    belong to the thread that enters. Of nested contexts the innermost counts. The backward pass may run
    anywhere, later, twice or never; files go when the graph does. Gradients are bit-equal to those without
    it.

    Parameters are never written, nor are the tensors of `keep` and tensors below `min_bytes`, of other
    devices than the CPU, sparse, quantised or of subclasses: they stay in memory as without a spool.

    Args:
        directory: Where the process gets a folder of its own, which goes with it. Made when it is first
            needed.
        budget_bytes: The most bytes of saved tensors in memory, but for the largest one.
        min_bytes: Smaller tensors stay in memory, uncounted.
        ahead_bytes: The most bytes that are read ahead of the backward pass, within the budget.
        quota_bytes: The most bytes on disk; no limit when None.
        keep: Modules or tensors whose memory is never written.
        choose: Says which tensors may be written; all that can be when None.
        operations: Only what these operations made may be written, for example ["ConvolutionBackward0"]; see
            `choice.made_by`.
        checksum: Whether what is read from disk is compared with a checksum of what was written.
        bits: Whether booleans are written as bits, without loss.
        store_dtype: "bf16" or "int8" to write float32 and float64 with less precision: the gradients are not
            exact, and the report says so.

    Raises:
        ValueError: A number is negative.
    """

    def __init__(  # noqa: PLR0913 - options by keyword
        self,
        directory: str | Path,
        budget_bytes: int,
        *,
        min_bytes: int = MIN_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
        quota_bytes: int | None = None,
        keep: Iterable[nn.Module | torch.Tensor] = (),
        choose: Choice | None = None,
        operations: Collection[str] | None = None,
        checksum: bool = False,
        bits: bool = True,
        store_dtype: StoreDtype | None = None,
    ) -> None:
        if min(budget_bytes, min_bytes, ahead_bytes) < 0:
            raise ValueError("budget_bytes, min_bytes and ahead_bytes cannot be negative")
        options = DiskOptions(quota_bytes, checksum, EncodingOptions(store_dtype, bits))
        self._store = BlockStore(Path(directory), budget_bytes, ahead_bytes, options)
        self._is_lossy = store_dtype is not None
        self._min_bytes = min_bytes
        self._choose = all_of(choose, None if operations is None else made_by(operations))
        self._keep = frozenset(_keys(keep))
        self._blocks: dict[tuple[object, ...], weakref.ref[Block]] = {}
        self._contexts = threading.local()
        self._kept_bytes = self._saved_bytes = 0
        self._finalizer = weakref.finalize(self, BlockStore.close, self._store)

    def __enter__(self) -> Self:
        hooks = saved_tensors_hooks(self.pack, _unpack)
        stack = self._contexts.__dict__.setdefault("stack", [])
        if not stack:
            self._store.begin_step()
        hooks.__enter__()
        stack.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stack = self._contexts.stack
        stack.pop().__exit__(kind, error, traceback)
        if not stack:
            self._store.end_step()

    def report(self) -> Report:
        """Return what has been done so far."""
        return replace(self._store.snapshot(), saved_bytes=self._saved_bytes, kept_bytes=self._kept_bytes)

    def close(self) -> None:
        """Stop the threads and remove the files; tensors that are on disk are lost."""
        self._finalizer()

    def pack(self, tensor: torch.Tensor) -> object:
        """Take a tensor that autograd saves; returns what it holds instead.

        Raises:
            SpoolError: The disk fails.
        """
        byte_count = tensor.numel() * tensor.element_size()
        self._saved_bytes += byte_count
        if not self._may_be_written(tensor, byte_count):
            self._kept_bytes += byte_count
            return Kept(tensor.detach(), tensor._version) if _has_version(tensor) else tensor
        watch, storage = VersionWatch(tensor), tensor.untyped_storage()
        view = View.of(tensor)
        if byte_count * _COMPACT_SHARE < storage.nbytes():
            return self._saved_compact(tensor, byte_count, view, watch)
        key: tuple[object, ...] = (storage._cdata, tensor._version)
        if self._is_lossy:  # bytes seen as two dtypes are two blocks: each loses another part
            key = (*key, view.dtype)
        return self._saved(key, storage, storage.nbytes(), view, watch)

    def _saved_compact(self, tensor: torch.Tensor, byte_count: int, view: View, watch: VersionWatch) -> Saved:
        """Keep a small part of a large storage as a copy of its own."""
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version, view.offset, view.shape, view.strides, view.dtype)
        bare = View(view.shape, view.strides, view.offset, view.dtype).tensor(storage)
        copied = bare.clone(memory_format=torch.contiguous_format)
        compact = replace(view, strides=copied.stride(), offset=0)
        return self._saved(key, copied.untyped_storage(), byte_count, compact, watch, origin=storage)

    def _saved(
        self,
        key: tuple[object, ...],
        storage: torch.UntypedStorage,
        byte_count: int,
        view: View,
        watch: VersionWatch,
        origin: torch.UntypedStorage | None = None,
    ) -> Saved:
        with self._store.packing:
            known = self._blocks.get(key)
            block = known() if known is not None else None
            if block is not None and not block.alive.expired() and self._store.adopt(block):
                return Saved(self._store, block, view, watch)
            alive = StorageWeakRef(storage if origin is None else origin)
            block = Block(0, byte_count, view.dtype, key, alive, storage)
            self._blocks[key] = weakref.ref(block, lambda _: self._blocks.pop(key, None))
        self._store.add(block)
        return Saved(self._store, block, view, watch)

    def _may_be_written(self, tensor: torch.Tensor, byte_count: int) -> bool:
        if byte_count < self._min_bytes or type(tensor) is not torch.Tensor:
            return False
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
            return False
        if tensor.is_leaf and tensor.requires_grad:
            return False
        base = tensor._base
        if isinstance(base, nn.Parameter) or (base is not None and base.is_leaf and base.requires_grad):
            return False
        if tensor.untyped_storage()._cdata in self._keep:
            return False
        return self._choose is None or self._choose(tensor)


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    tensor: torch.Tensor = saved.unpack()
    return tensor


def _has_version(tensor: torch.Tensor) -> bool:
    return not tensor.is_inference()


def _keys(keep: Iterable[nn.Module | torch.Tensor]) -> Iterable[int]:
    for entry in keep:
        tensors = [entry] if isinstance(entry, torch.Tensor) else [*entry.parameters(), *entry.buffers()]
        for tensor in tensors:
            yield tensor.untyped_storage()._cdata
