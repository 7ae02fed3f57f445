"""CUDA transfers: copies on two streams of a CUDA device."""

from functools import cached_property

import torch

from trocar_server.config import PINNED_BYTES
from trocar_server.engine.transfer.pinned_pool import CopyEvent
from trocar_server.engine.transfer.streams import StreamTransfers
from trocar_server.engine.transfer.transfers import HOST, Transfers


class CudaBackend:
    """Copies on one stream for each direction, beside the compute stream. Owner thread only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _down(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    @cached_property
    def _up(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def allocate(self, byte_count: int) -> torch.Tensor:
        """See `CopyBackend`."""
        return torch.empty(byte_count, dtype=torch.uint8, pin_memory=True)

    def release(self) -> None:
        """See `CopyBackend`; torch before 2.14 keeps the memory for pieces of the same size."""
        empty = getattr(torch.accelerator, "empty_host_cache", None)
        if empty is not None:
            empty()

    def download(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        """See `CopyBackend`."""
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
            # `blocking`: the waiting thread sleeps, and frees its core.
            event: CopyEvent = self._down.record_event(torch.cuda.Event(blocking=True))
        # Without this the allocator may reuse the memory on the compute stream before this copy is done.
        source.record_stream(self._down)
        return event

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """See `CopyBackend`."""
        with torch.cuda.stream(self._up):  # the memory belongs to this stream: no earlier work still uses it
            return torch.empty_like(like, device=self._device)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        """See `CopyBackend`."""
        with torch.cuda.stream(self._up):
            target.copy_(source, non_blocking=True)
            event: CopyEvent = self._up.record_event()
        return event

    def hand_over(self, target: torch.Tensor, event: CopyEvent) -> None:
        """See `CopyBackend`."""
        if not isinstance(event, torch.cuda.Event):
            raise TypeError("this copy belongs to another backend")
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(event)
        target.record_stream(computing)

    def synchronize(self) -> None:
        """See `CopyBackend`."""
        torch.cuda.current_stream(self._device).synchronize()


def transfers_of(device: torch.device, pinned_bytes: int = PINNED_BYTES) -> Transfers:
    """Return the transfers of a device.

    Args:
        device: The models' device.
        pinned_bytes: The most page-locked memory; with 0 every copy is synchronous.
    """
    if device.type != "cuda":
        return HOST
    return StreamTransfers(device, CudaBackend(device), pinned_bytes)
