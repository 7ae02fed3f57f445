"""Copies on two streams of a CUDA device.

Written without a GPU at hand: nothing here has run on one yet. What it must do is in `CopyBackend`, and the
tests have a backend that keeps exactly to that and no more.
"""

from functools import cached_property

import torch

from trocar_server.engine.transfer.pool import Event
from trocar_server.engine.transfer.seam import HOST, Transfers
from trocar_server.engine.transfer.streams import StreamTransfers

PINNED_BYTES = 512 << 20


class CudaBackend:
    """Copies on one stream for each direction, beside the stream that computes. Owner thread only."""

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

    def download(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """See `CopyBackend`."""
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
            # `blocking`: the thread that waits for it sleeps, and leaves its core to others.
            event: Event = self._down.record_event(torch.cuda.Event(blocking=True))
        # The allocator may give the memory to what the other stream does next, unless it knows of this one.
        source.record_stream(self._down)
        return event

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """See `CopyBackend`."""
        with torch.cuda.stream(self._up):  # the memory belongs to this stream: no earlier work still uses it
            return torch.empty_like(like, device=self._device)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """See `CopyBackend`."""
        with torch.cuda.stream(self._up):
            target.copy_(source, non_blocking=True)
            event: Event = self._up.record_event()
        return event

    def hand_over(self, target: torch.Tensor, event: Event) -> None:
        """See `CopyBackend`."""
        if not isinstance(event, torch.cuda.Event):
            raise TypeError("another backend began this copy")
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(event)
        target.record_stream(computing)

    def synchronize(self) -> None:
        """See `CopyBackend`."""
        torch.cuda.current_stream(self._device).synchronize()


def transfers_of(device: torch.device, pinned_bytes: int = PINNED_BYTES) -> Transfers:
    """Return what copies for a device.

    Args:
        device: The models' device.
        pinned_bytes: The most page-locked memory; without any every copy waits for its end.
    """
    if device.type != "cuda":
        return HOST
    return StreamTransfers(device, CudaBackend(device), pinned_bytes)
