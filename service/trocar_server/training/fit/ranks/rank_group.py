"""Process group of a fit's ranks: torch.distributed's gloo, which carries weights and gradients.

group = RankGroup(file_store(folder, 2), LOOPBACK, rank=0, size=2)
group.copy_from_first(weights)
group.average_at_first(gradients)
"""

import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from trocar_server.storage.tensor_bytes import bytes_of

LOOPBACK = "127.0.0.1"
_dist: Any = torch.distributed  # its stubs lack a group's options and collectives (2.14)
TRANSFER_S = 300.0
"""For one transfer on one machine; every rank is ready for it when it begins."""
NETWORK_TRANSFER_S = 60.0
"""For one between nodes: a node that vanishes without a word is noticed then, at the latest."""
_PORTION_BYTES = 64 << 20


def file_store(folder: Path, size: int) -> Any:
    """Return the rendezvous of ranks on one machine: a file in a private folder, new for each group."""
    return _dist.FileStore(str(folder / "rendezvous"), size)


def first_store(host: str) -> tuple[Any, str]:
    """Open the rendezvous of ranks on several nodes, at rank 0; returns it and its address.

    Args:
        host: Where it listens; torch alone would listen on every interface.

    Raises:
        OSError: The address cannot be used.
    """
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return _dist.TCPStore(host, port, timeout=_seconds(NETWORK_TRANSFER_S), **options), f"{host}:{port}"


def other_store(address: str) -> Any:
    """Return the rendezvous that rank 0 has opened.

    Raises:
        RuntimeError: It is not there.
    """
    host, _, port = address.rpartition(":")
    return _dist.TCPStore(host, int(port), timeout=_seconds(NETWORK_TRANSFER_S))


class RankGroup:
    """The process group of a fit's ranks; beside torch's default group, so that several fits can have one.

    Args:
        store: The rendezvous.
        host: Address of this process, by which the others reach it.
        rank: This process, from 0.
        size: Number of ranks. The constructor waits for all of them.
        transfer_s: Seconds for one transfer.

    Raises:
        RuntimeError: A rank did not come.
    """

    def __init__(self, store: Any, host: str, rank: int, size: int, transfer_s: float = TRANSFER_S) -> None:
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = _seconds(transfer_s)
        self._store = store
        self._group = _dist.ProcessGroupGloo(self._store, rank, size, options)
        self._size = size

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors of every rank by rank 0's, bit by bit."""
        if not tensors:
            return
        flat = torch.cat([bytes_of(tensor) for tensor in tensors])
        self._group.broadcast([flat], _dist.BroadcastOptions()).wait()  # from rank 0, the default
        if not self._group.rank():
            return
        with torch.no_grad():
            for tensor, part in zip(tensors, flat.split([t.nbytes for t in tensors]), strict=True):
                # A clone is aligned for its dtype, unlike a part of the buffer.
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

    def copy_large_from_first(self, tensors: Sequence[Tensor]) -> None:
        """As `copy_from_first`, in portions: each is copied in memory once more."""
        portion, byte_count = list[Tensor](), 0
        for tensor in tensors:
            if portion and byte_count + tensor.nbytes > _PORTION_BYTES:
                self.copy_from_first(portion)
                portion, byte_count = [], 0
            portion.append(tensor)
            byte_count += tensor.nbytes
        self.copy_from_first(portion)

    def average_at_first(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors of rank 0 by the averages over the ranks; on other ranks they are undefined.

        Each rank's values are multiplied by 1 / size before the sum, as DistributedDataParallel does.
        """
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            result = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in result]).mul_(1 / self._size)
            options = _dist.ReduceOptions()
            options.reduceOp = _dist.ReduceOp.SUM
            self._group.reduce([flat], options).wait()
            for tensor, part in zip(result, flat.split([t.numel() for t in result]), strict=True):
                tensor.copy_(part.view(tensor.shape))


def _seconds(count: float) -> timedelta:
    return timedelta(seconds=count)
