"""Rank channel: messages and tensors between the ranks of a data-parallel fit.

Messages go through a pipe, tensors of the model through torch.distributed's gloo on the loopback interface.
The rendezvous is a file in a private folder.
"""

import io
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

_dist: Any = torch.distributed  # its stubs lack a group's options and collectives (2.14)
_TRANSFER_TIMEOUT = timedelta(minutes=5)
"""For one transfer; every rank is ready for it when it begins."""


def send(channel: Connection, message: Any) -> None:
    """Send a message; its tensors are copied.

    Raises:
        OSError: The other process has ended.
    """
    buffer = io.BytesIO()
    torch.save(message, buffer)
    channel.send_bytes(buffer.getbuffer())


def receive(channel: Connection) -> Any:
    """Wait for a message.

    Raises:
        EOFError, OSError: The other process has ended.
    """
    # Only the process that started this one, or that was started by it, has the other end of the pipe.
    return torch.load(io.BytesIO(channel.recv_bytes()), weights_only=False)


class RankGroup:
    """The process group of a fit's ranks; beside torch's default group, so that several fits can have one.

    Args:
        folder: A private folder, empty at the first rank's arrival.
        rank: This process, from 0.
        size: Number of ranks. The constructor waits for all of them.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TRANSFER_TIMEOUT
        self._store = _dist.FileStore(str(folder / "rendezvous"), size)
        self._group = _dist.ProcessGroupGloo(self._store, rank, size, options)
        self._size = size

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors of every rank by those of rank 0, bit by bit."""
        if not tensors:
            return
        flat = torch.cat([_bytes(tensor) for tensor in tensors])
        self._group.broadcast([flat], _dist.BroadcastOptions()).wait()  # from rank 0, the default
        if not self._group.rank():
            return
        with torch.no_grad():
            for tensor, part in zip(tensors, flat.split([t.nbytes for t in tensors]), strict=True):
                # A clone is aligned for its dtype, unlike a part of the buffer.
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

    def average_at_first(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors of rank 0 by the averages over the ranks; those of other ranks are undefined.

        Each rank's values are multiplied by 1 / size before the sum, as DistributedDataParallel does.
        """
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            found = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in found]).mul_(1 / self._size)
            options = _dist.ReduceOptions()
            options.reduceOp = _dist.ReduceOp.SUM
            self._group.reduce([flat], options).wait()
            for tensor, part in zip(found, flat.split([t.numel() for t in found]), strict=True):
                tensor.copy_(part.view(tensor.shape))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
