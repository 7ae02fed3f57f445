"""Copies beside what a device computes, through page-locked memory."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from trocar_server.engine.plan import Payload
from trocar_server.engine.transfer.pool import Event, Piece, PinnedPool
from trocar_server.engine.transfer.seam import HOST, Copies

_LEAST_BYTES = 256 << 10
"""Below this waiting on another thread takes longer than the copy."""

_CHUNK_BYTES = 4 << 20
"""Inputs go to page-locked memory in such pieces: while one is on its way the next is laid out."""


class CopyBackend(Protocol):
    """What a device can do; the copies of each direction are done in the order of the calls."""

    def allocate(self, byte_count: int) -> torch.Tensor:
        """Return page-locked host memory, of single bytes."""
        ...

    def release(self) -> None:
        """Unlock memory that `allocate` returned and nobody has any more."""
        ...

    def download(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Begin to copy to page-locked memory what the source will be when the present work is done.

        The device keeps the memory of the source until then, whoever drops it.
        """
        ...

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device that only `upload` may write, until it is handed over."""
        ...

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Begin to copy from page-locked memory."""
        ...

    def hand_over(self, target: torch.Tensor, event: Event) -> None:
        """Let what the device does from now on wait for a copy, and use its target."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has computed what it was given."""
        ...


class StreamTransfers:
    """See `Transfers`.

    What is small, not on this device, or finds no page-locked memory is copied as `HostTransfers` does it.

    Args:
        device: The models' device.
        backend: Copies.
        max_bytes: The most page-locked memory.
        least_bytes: What is smaller is copied at once.
    """

    def __init__(
        self, device: torch.device, backend: CopyBackend, max_bytes: int, least_bytes: int = _LEAST_BYTES
    ) -> None:
        self._device = device
        self._backend = backend
        self._least_bytes = least_bytes
        self.pool = PinnedPool(max_bytes, backend.allocate, backend.release)
        self._begun: list[Event] = []
        # One is enough: copies are done in the order in which they are waited for.
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix=f"copies-{device}")

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
        with torch.inference_mode():  # in which values of every mode may be copied
            source = _bytes(value.contiguous())
            try:
                piece.event = self._backend.download(piece.memory[: value.nbytes], source)
            except BaseException:
                self.pool.give_back(piece)
                raise
        self._begun.append(piece.event)
        return self.pool.lend(piece, value.nbytes)

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """See `Transfers`; what is laid out in another order keeps that, on the plain way."""
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

    def _staged(self, target: torch.Tensor, tensor: torch.Tensor, piece: Piece) -> Event:
        """Bring a tensor to its target through a piece; returns the event of the last copy."""
        given, wanted = _bytes(tensor), _bytes(target)
        for start in range(0, tensor.nbytes, _CHUNK_BYTES):
            part = slice(start, min(start + _CHUNK_BYTES, tensor.nbytes))
            piece.memory[part].copy_(given[part])
            piece.event = self._backend.upload(wanted[part], piece.memory[part])
        assert piece.event is not None  # there was at least one byte
        return piece.event


def _wait_for(events: Sequence[Event]) -> None:
    for event in events:
        event.synchronize()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
