"""Asynchronous copies through page-locked memory, concurrent with the device's computation."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from trocar_server.engine.request.plan import Payload
from trocar_server.engine.transfer.pinned_pool import CopyEvent, Piece, PinnedPool
from trocar_server.engine.transfer.transfers import HOST, Copies
from trocar_server.storage.tensor_bytes import bytes_of

_LEAST_BYTES = 256 << 10
"""Below this waiting on another thread takes longer than the copy."""

_CHUNK_BYTES = 4 << 20
"""Inputs go to page-locked memory in chunks of this size: while one is copied the next is laid out."""


class CopyBackend(Protocol):
    """The copy operations of a device; copies of each direction are done in the order of the calls."""

    def allocate(self, byte_count: int) -> torch.Tensor:
        """Return page-locked host memory, as uint8."""
        ...

    def release(self) -> None:
        """Unlock memory from `allocate` that is no longer referenced."""
        ...

    def download(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        """Begin to copy the source to page-locked memory, after the work queued so far.

        The device keeps the source's memory until then, even if it is dropped.
        """
        ...

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device that only `upload` may write, until it is handed over."""
        ...

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        """Begin to copy from page-locked memory."""
        ...

    def hand_over(self, target: torch.Tensor, event: CopyEvent) -> None:
        """Let all later work of the device wait for a copy, and use its target."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work."""
        ...


class StreamTransfers:
    """See `Transfers`.

    Tensors that are small, on another device, or find no page-locked memory are copied as by `HostTransfers`.

    Args:
        device: The models' device.
        backend: The device's copy operations.
        max_bytes: The most page-locked memory.
        least_bytes: Smaller tensors are copied synchronously.
    """

    def __init__(
        self, device: torch.device, backend: CopyBackend, max_bytes: int, least_bytes: int = _LEAST_BYTES
    ) -> None:
        self._device = device
        self._backend = backend
        self._least_bytes = least_bytes
        self.pool = PinnedPool(max_bytes, backend.allocate, backend.release)
        self._begun: list[CopyEvent] = []
        # One thread is enough: copies finish in the order in which they are awaited.
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix=f"copies-{device}")

    is_synchronous = False

    @property
    def has_begun(self) -> bool:
        """See `Transfers`."""
        return bool(self._begun)

    def to_host(self, value: torch.Tensor) -> Payload:
        """See `Transfers`."""
        is_here = value.device.type == self._device.type
        piece = self._piece(value.nbytes) if is_here else None
        if piece is None:
            return HOST.to_host(value)
        with torch.inference_mode():  # allows copies of values of every mode
            source = bytes_of(value.contiguous())
            try:
                piece.event = self._backend.download(piece.memory[: value.nbytes], source)
            except BaseException:
                self.pool.give_back(piece)
                raise
        self._begun.append(piece.event)
        return self.pool.lend(piece, value.nbytes)

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """See `Transfers`; other memory layouts are kept, by a synchronous copy."""
        is_plain = tensor.device.type == "cpu" and tensor.is_contiguous()
        piece = self._piece(tensor.nbytes) if is_plain else None
        if piece is None:
            return tensor.to(device)
        target = self._backend.room(tensor)
        try:
            self._backend.hand_over(target, self._staged(target, tensor, piece))
        finally:
            self.pool.give_back(piece)
        return target

    def take(self) -> Copies | None:
        """See `Transfers`."""
        if not self._begun:
            return None
        events, self._begun = self._begun, []
        return Copies(self._waiter.submit(_wait_for, events))

    def wait(self) -> None:
        """See `Transfers`."""
        events, self._begun = self._begun, []
        _wait_for(events)

    def synchronize(self) -> None:
        """See `Transfers`."""
        self._backend.synchronize()

    def close(self) -> None:
        """See `Transfers`."""
        self._waiter.shutdown(wait=True)

    def _piece(self, byte_count: int) -> Piece | None:
        return self.pool.take(byte_count) if byte_count >= max(self._least_bytes, 1) else None

    def _staged(self, target: torch.Tensor, tensor: torch.Tensor, piece: Piece) -> CopyEvent:
        """Copy a tensor to its target through a piece; returns the event of the last copy."""
        given, wanted = bytes_of(tensor), bytes_of(target)
        for start in range(0, tensor.nbytes, _CHUNK_BYTES):
            part = slice(start, min(start + _CHUNK_BYTES, tensor.nbytes))
            piece.memory[part].copy_(given[part])
            piece.event = self._backend.upload(wanted[part], piece.memory[part])
        assert piece.event is not None  # there was at least one byte
        return piece.event


def _wait_for(events: Sequence[CopyEvent]) -> None:
    for event in events:
        event.synchronize()
