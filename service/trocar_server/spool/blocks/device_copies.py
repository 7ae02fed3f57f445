"""Copies between a device and host memory, on a side stream that overlaps with compute."""

from typing import Protocol

import torch


class Event(Protocol):
    """Completion of a copy; as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


class Copier(Protocol):
    """Starts copies for one device. Copies in either direction complete in the order of the calls.

    A copy to the device completes after all copies to the host that were started before.
    """

    def to_host(self, source: torch.UntypedStorage) -> tuple[torch.UntypedStorage, Event]:
        """Start to copy device memory, after the device's present work.

        The source must live until the copy is done, the result need not.
        """
        ...

    def to_device(self, source: torch.UntypedStorage) -> tuple[torch.UntypedStorage, Event]:
        """Start to copy host memory. The source need not live any longer."""
        ...

    def hand_over(self, storage: torch.UntypedStorage, event: Event) -> None:
        """Make later work of the device wait for a copy to it, and use the copy."""
        ...


class CudaCopier:
    """Copies on two streams of a CUDA device, one for each direction, through pinned memory.

    Pinned memory comes from torch's pool for it, which caches freed memory, and knows which of it a copy
    still uses. It allocates sizes of powers of two.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def to_host(self, source: torch.UntypedStorage) -> tuple[torch.UntypedStorage, Event]:
        """See `Copier`."""
        target = torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=True)
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            target.copy_(_bytes(source), non_blocking=True)
            return target.untyped_storage(), self._down.record_event()

    def to_device(self, source: torch.UntypedStorage) -> tuple[torch.UntypedStorage, Event]:
        """See `Copier`. For memory that is not pinned, as after reading from disk, torch waits here."""
        self._up.wait_stream(self._down)
        with torch.cuda.stream(self._up):  # the memory, too, belongs to this stream: it waits for no other
            target = torch.empty(source.nbytes(), dtype=torch.uint8, device=self._device)
            target.copy_(_bytes(source), non_blocking=True)
            return target.untyped_storage(), self._up.record_event()

    def hand_over(self, storage: torch.UntypedStorage, event: Event) -> None:
        """See `Copier`."""
        if not isinstance(event, torch.cuda.Event):
            raise TypeError("this copy belongs to another copier")
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        _bytes(storage).record_stream(current)


def copier_of(device: torch.device) -> Copier | None:
    """Return the copier of a device; None for host memory, and for devices whose tensors stay there."""
    return CudaCopier(device) if device.type == "cuda" else None


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
