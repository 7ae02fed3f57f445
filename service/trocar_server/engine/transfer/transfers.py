"""Copy backend: its interface, and the one for tensors that are in host memory already."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

import torch

from trocar_server.engine.request.plan import Payload


class Copies:
    """Copies to the host that were begun together.

    Args:
        done: Completes when all copies are done, with the error of one that failed.
    """

    def __init__(self, done: "Future[None]") -> None:
        self._done = done

    async def arrived(self) -> None:
        """Wait until the bytes may be read; safe to cancel.

        Raises:
            Exception: The device's error for a copy that failed.
        """
        await asyncio.wrap_future(self._done)


class Transfers(Protocol):
    """The copies of one device. Every method belongs to the owner thread."""

    @property
    def has_begun(self) -> bool:
        """Whether there are copies to the host that were not taken."""
        ...

    @property
    def is_synchronous(self) -> bool:
        """Whether the device has finished its work when a call of torch returns."""
        ...

    def to_host(self, value: torch.Tensor) -> Payload:
        """Return the bytes of a dense value in row-major order.

        The copy may still be running: read the bytes only when what `take` returns has arrived. The value
        may be dropped at once, but must not be written to.
        """
        ...

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor of host memory on the device, for all later work of the device.

        Its host memory may be reused at once.
        """
        ...

    def take(self) -> Copies | None:
        """Return the copies to the host begun since the last time, or None."""
        ...

    def wait(self) -> None:
        """Wait for the copies to the host that were not taken."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work; copies may still be running."""
        ...

    def close(self) -> None:
        """Close, when all copies are done."""
        ...


class HostTransfers:
    """Transfers of a CPU: the bytes are on the host already, and no copy is ever pending.

    Also for devices without streams: there every copy is synchronous.
    """

    has_begun = False
    is_synchronous = True

    def to_host(self, value: torch.Tensor) -> Payload:
        """See `Transfers`; without a copy where the bytes are on the host in row-major order already."""
        dense = value.cpu().contiguous()  # as `bytes_of`, without a call in the path of every request
        return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """See `Transfers`; the tensor itself where the device is a CPU."""
        return tensor.to(device)

    def take(self) -> Copies | None:
        """See `Transfers`."""
        return None

    def wait(self) -> None:
        """See `Transfers`."""

    def synchronize(self) -> None:
        """See `Transfers`."""

    def close(self) -> None:
        """See `Transfers`."""


HOST = HostTransfers()


class _ThisThread(threading.local):
    """Attributes of the thread that asks.

    Attributes:
        transfers: Its transfers; those of host memory on any thread but the owner.
    """

    transfers: Transfers = HOST


this_thread = _ThisThread()


@contextmanager
def using(transfers: Transfers) -> Iterator[None]:
    """Make these the transfers of this thread inside the context, and close them at its end."""
    this_thread.transfers = transfers
    try:
        yield
    finally:
        this_thread.transfers = HOST
        transfers.close()
