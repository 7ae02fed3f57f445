"""Saved tensors on disk: what autograd keeps for the backward pass, within a memory budget.

    spool = Spool("/scratch", budget_bytes="256MiB")
    with spool:
        loss = criterion(model(x), y)
    loss.backward()

See `packing` for what is saved how, `ledger` for what is written and when, and `chunks` for the files.
"""

import os
import threading
import weakref
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn

from trocar_api.byte_sizes import byte_count
from trocar_server.spool.blocks.block_store import BlockStore
from trocar_server.spool.blocks.device_copies import copier_of
from trocar_server.spool.blocks.device_tier import Tiers
from trocar_server.spool.files.encoding import EncodingOptions, StoreDtype
from trocar_server.spool.files.options import DiskOptions
from trocar_server.spool.report import Report
from trocar_server.spool.saved.choice import Choice, all_of, made_by
from trocar_server.spool.saved.codec import Codec, check_codec
from trocar_server.spool.saved.packing import Packer
from trocar_server.spool.saved.wrapping import Wrapped

MIN_BYTES = 32 << 10
AHEAD_BYTES = 64 << 20
DEVICE_AHEAD_BYTES = 1 << 30

_SPOOLS: "weakref.WeakSet[Spool]" = weakref.WeakSet()


class Spool(AbstractContextManager["Spool"]):
    """Keeps what autograd saves within a budget of memory, and the rest on disk.

    A context, to be entered for every forward pass, also in several threads at once: hooks of saved tensors
    belong to the thread that enters. Of nested contexts the innermost counts. The backward pass may run
    anywhere, later, twice or never; files go when the graph does. Gradients are bit-equal to those without
    it.

    Parameters are never written, nor are the tensors of `keep` and tensors below `min_bytes`, sparse,
    quantised or of subclasses: they stay in memory as without a spool. Tensors of CUDA devices go to host
    memory, within the same budget, and from there to disk. Tensors of other devices stay where they are.

    A tensor that is changed in place between forward and backward raises as without a spool; inside
    `torch.autograd.graph.allow_mutation_on_saved_tensors` backward uses what it was. What torch
    itself does not see, it does not see either: changes through `.data` or NumPy come too late for what is on
    disk.

    Args:
        directory: Where the process gets a folder of its own, which goes with it. Made when it is first
            needed.
        budget_bytes: The most bytes of saved tensors in memory, but for the largest one. This and other sizes
            are whole numbers, or texts such as "256MiB".
        min_bytes: Smaller tensors stay in memory, uncounted.
        ahead_bytes: The most bytes that are read ahead of the backward pass, within the budget, but for a
            single tensor that is larger.
        device_ahead_bytes: The most bytes of a CUDA device that are on their way to host memory, and the most
            that are brought back ahead of the backward pass, but for a single tensor that is larger.
        device_bytes: The most bytes of a forward pass that stay on a CUDA device: those that it saves last.
            How many it will save is known from the pass before; of the first, none stay.
        quota_bytes: The most bytes on disk; no limit when None.
        modules: Only what calls of these modules save, in all threads, for as long as somebody is in the
            context; see `wrap`. All that the thread saves when None.
        keep: Modules or tensors whose memory is never written.
        choose: Says which tensors may be written; all that can be when None.
        operations: Only what these operations made may be written, for example ["ConvolutionBackward0"]; see
            `choice.made_by`.
        checksum: Whether what is read from disk is compared with a checksum of what was written.
        bits: Whether booleans are written as bits, without loss.
        store_dtype: "bf16" or "int8" to write float32 and float64 with less precision: the gradients are not
            exact, and the report says so.
        codec: A pair of functions of yours, `pack` and `unpack`, around what may be written; see
            `codec.Codec`.

    Raises:
        ValueError: A number is negative, or a text is no size.
        TypeError: `codec` has not both methods, or a size is neither a number nor a text.
    """

    def __init__(  # noqa: PLR0913 - options by keyword
        self,
        directory: str | Path,
        budget_bytes: int | str,
        *,
        min_bytes: int | str = MIN_BYTES,
        ahead_bytes: int | str = AHEAD_BYTES,
        device_ahead_bytes: int | str = DEVICE_AHEAD_BYTES,
        device_bytes: int | str = 0,
        quota_bytes: int | str | None = None,
        modules: Iterable[nn.Module] | None = None,
        keep: Iterable[nn.Module | torch.Tensor] = (),
        choose: Choice | None = None,
        operations: Collection[str] | None = None,
        checksum: bool = False,
        bits: bool = True,
        store_dtype: StoreDtype | None = None,
        codec: Codec | None = None,
    ) -> None:
        given = (budget_bytes, min_bytes, ahead_bytes, device_ahead_bytes, device_bytes)
        names = ("budget_bytes", "min_bytes", "ahead_bytes", "device_ahead_bytes", "device_bytes")
        counts = list(map(byte_count, given, names))
        quota = None if quota_bytes is None else byte_count(quota_bytes, "quota_bytes")
        for name, count in zip(names, counts, strict=True):
            if count < 0:
                raise ValueError(f"{name} cannot be negative")
        budget, least, ahead, device_ahead, on_device = counts
        check_codec(codec)
        options = DiskOptions(quota, checksum, EncodingOptions(store_dtype, bits))
        self._store = BlockStore(Path(directory), budget, ahead, options)
        chosen = all_of(choose, None if operations is None else made_by(operations))
        # Bytes seen as two dtypes are two blocks where each loses another part.
        tiers = Tiers(self._store, device_ahead, copier_of, on_device)
        self._packer = Packer(tiers, least, chosen, tells_dtypes=store_dtype is not None, codec=codec)
        self._modules = None if modules is None else list(modules)
        self._keep = [*keep, *(self._modules or [])]
        self._lock = threading.Lock()
        self._thread_count = 0
        self._wrapped: Wrapped | None = None
        self._contexts = threading.local()
        _SPOOLS.add(self)

    def __enter__(self) -> Self:
        stack: list[ExitStack] = self._contexts.__dict__.setdefault("stack", [])
        with ExitStack() as entered:
            if not stack:
                self._packer.keep(self._keep)
                self._packer.tiers.begin_step()
            if self._modules is None:
                entered.enter_context(self._packer.hooks())
            else:
                entered.callback(self._unwrap)
                self._rewrap(self._modules)
            stack.append(entered.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._contexts.stack.pop().close()

    def wrap(self, modules: Iterable[nn.Module]) -> Wrapped:
        """Spool what calls of these modules save from now on, without a context, in any thread.

            spool.wrap(model.layers)
            loss = torch.nn.DataParallel(model)(x).sum()

        Returns:
            A handle to `remove` it, which is also a context.
        """
        modules = list(modules)
        self._keep.extend(modules)
        self._packer.keep(modules)
        return Wrapped(modules, self._packer.hooks)

    def report(self) -> Report:
        """Return the report so far."""
        packer = self._packer
        return replace(self._store.snapshot(), saved_bytes=packer.saved_bytes, kept_bytes=packer.kept_bytes)

    @property
    def counters(self) -> Report:
        """What is counted as it happens, in bytes written and read and times waited; takes no lock."""
        return self._store.report

    @property
    def store(self) -> BlockStore:
        """The blocks of saved tensors, in memory and on disk; for diagnosis."""
        return self._store

    @property
    def packer(self) -> Packer:
        """The pack hook; `spool.packer.pack(tensor)` saves one tensor, as autograd does."""
        return self._packer

    def close(self) -> None:
        """Stop the threads and remove the files; tensors that are on disk are lost.

        Not needed: files go with the last graph and the spool, or with the process.
        """
        self._store.close()

    def _rewrap(self, modules: list[nn.Module]) -> None:
        with self._lock:
            self._thread_count += 1
            if self._wrapped is None:
                self._wrapped = Wrapped(modules, self._packer.hooks)

    def _unwrap(self) -> None:
        with self._lock:
            self._thread_count -= 1
            if not self._thread_count and self._wrapped is not None:
                self._wrapped.remove()
                self._wrapped = None

    def _begin_anew(self) -> None:
        """In a forked process: replace the locks, and leave the contexts of other threads to the parent."""
        self._lock = threading.Lock()
        self._packer.renew_locks()
        self._thread_count = len(self._contexts.__dict__.get("stack", []))
        if not self._thread_count and self._wrapped is not None:
            self._wrapped.remove()
            self._wrapped = None


def _begin_anew_in_fork() -> None:
    for spool in list(_SPOOLS):
        spool._begin_anew()


os.register_at_fork(after_in_child=_begin_anew_in_fork)
