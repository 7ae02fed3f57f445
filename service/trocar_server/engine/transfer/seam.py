"""What the engine asks of copies, and how that is done where tensors are in host memory already."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

import torch

from trocar_server.engine.plan import Payload


class Copies:
    """Copies to the host that were begun together.

    Args:
        done: Ends when all are done, with the error of one that failed.
    """

    def __init__(self, done: "Future[None]") -> None:
        self._done = done

    async def arrived(self) -> None:
        """Wait until the bytes may be read; who is cancelled meanwhile leaves nothing behind.

        Raises:
            Exception: What the device says of a copy that failed.
        """
        await asyncio.wrap_future(self._done)


class Transfers(Protocol):
    """The copies of one device. Every method belongs to the owner thread."""

    @property
    def has_begun(self) -> bool:
        """Whether there are copies to the host that nobody took."""
        ...

    def to_host(self, value: torch.Tensor) -> Payload:
        """Return the bytes of a dense value in row-major order.

        They may be on their way: they are read when what `take` returns has arrived, not before. The value
        may be dropped at once, but nobody may write into it.
        """
        ...

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor of host memory on the device, for whatever the device does from now on.

        The memory that it was in may be used again at once.
        """
        ...

    def take(self) -> Copies | None:
        """Return the copies to the host begun since the last time; None where there are none."""
        ...

    def wait(self) -> None:
        """Wait for the copies to the host that nobody took."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has computed what it was given; copies may still be on their way."""
        ...

    def close(self) -> None:
        """End, when all copies are done."""
        ...


class HostTransfers:
    """Tensors of a CPU: their bytes are where they are needed, and nothing is ever on its way.

    Devices without streams, too: there every copy is done before the next line runs.
    """

    has_begun = False

    def to_host(self, value: torch.Tensor) -> Payload:
        """See `Transfers`; without a copy where the bytes are in that order on the host already."""
        return value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()

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


class _Own(threading.local):
    transfers: Transfers = HOST


_own = _Own()


def current() -> Transfers:
    """Return the transfers of this thread; those of host memory on any thread but the owner."""
    return _own.transfers


@contextmanager
def using(transfers: Transfers) -> Iterator[None]:
    """Make these the transfers of this thread inside the context, and close them at its end."""
    _own.transfers = transfers
    try:
        yield
    finally:
        _own.transfers = HOST
        transfers.close()
