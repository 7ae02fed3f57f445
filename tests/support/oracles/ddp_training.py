"""Oracle: the epochs of a fit as a plain script of DistributedDataParallel, one process for each rank.

The script's folder has `job.pt`, a `Job`; rank 0 writes the model's state after each step to `states.pt`.
"""

import copy
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.support.servers import warm_python


@dataclass
class Job:
    """What to train: SGD with momentum on cross-entropy, in train mode."""

    model: nn.Module
    images: Tensor
    labels: Tensor
    epochs: int
    batch_size: int
    """Of all ranks together."""
    learning_rate: float = 0.1
    clip_norm: float | None = None
    accumulation: int = 1
    seed: int = 0
    clamp: tuple[float, float] | None = None
    """Range of each gradient element of each rank, before the average."""
    threads: int = field(default_factory=torch.get_num_threads)


def states_of(job: Job, size: int, folder: Path) -> list[dict[str, Tensor]]:
    """Run the script on `size` processes; return the model's state after each batch."""
    torch.save(job, folder / "job.pt")
    command = [sys.executable, "-c", f"from {__name__} import main; main()", str(folder)]
    ranks = [warm_python.Popen([*command, str(rank), str(size)]) for rank in range(size)]
    assert [rank.wait() for rank in ranks] == [0] * size
    found: list[dict[str, Tensor]] = torch.load(folder / "states.pt")
    return found


def step_of_two_ranks(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> None:
    """Take a step of two ranks in one process: the mean of their gradients, and the buffers of rank 0.

    As the script, bit for bit: half of a value is exact.
    """
    ranks = [model, copy.deepcopy(model)]
    optimizer.zero_grad()
    for rank, one in enumerate(ranks):
        one.zero_grad()
        cross_entropy(one(images[rank::2].clone()), labels[rank::2].clone()).backward()
    for first, second in zip(*(one.parameters() for one in ranks), strict=True):
        assert first.grad is not None
        assert second.grad is not None
        first.grad = first.grad * 0.5 + second.grad * 0.5
    optimizer.step()


def main() -> None:
    """Be a rank of the script; the arguments are folder, rank and number of ranks."""
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    job: Job = torch.load(folder / "job.pt", weights_only=False)
    torch.set_num_threads(job.threads)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=2),
    )
    model = job.model.train().requires_grad_(True)
    if job.clamp is not None:
        low, high = job.clamp
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(low, high))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.learning_rate, momentum=0.9)
    data = TensorDataset(job.images, job.labels)
    sampler: Any = DistributedSampler(data, size, rank, seed=job.seed)
    states: list[dict[str, Tensor]] = []
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, job.batch_size // size, sampler=sampler):
            (cross_entropy(parallel(images), labels) / job.accumulation).backward()
            if len(states) % job.accumulation == job.accumulation - 1:
                if job.clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
            states.append({name: value.clone() for name, value in model.state_dict().items()})
    if rank == 0:
        torch.save(states, folder / "states.pt")
    dist.destroy_process_group()
