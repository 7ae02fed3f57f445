"""Sample order of a fit, reproducible from the seed.

for indices in batches(epoch_order(len(data), seed=0, epoch=2), batch_size=32):
    ...
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def epoch_order(count: int, seed: int, epoch: int, *, shuffle: bool = True) -> Tensor:
    """Return the sample indices of an epoch in order, int64 (count,).

    Shuffled it is `torch.randperm(count, generator=G)`, G a CPU generator seeded with `seed + epoch`.
    """
    if not shuffle:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(count, generator=generator)


def split_order(count: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the samples to train on and those to evaluate on, both ascending.

    The last `share * count` samples, rounded down, of `torch.randperm(count, generator=G)`, G a CPU generator
    seeded with `seed`, are evaluated.
    """
    kept = count - int(round(share * count, 6))  # 0.29 * 100 is below 29
    order = epoch_order(count, seed, 0)
    return order[:kept].sort().values, order[kept:].sort().values


def padded(order: Tensor, size: int) -> Tensor:
    """Return an order with its first samples again at the end, up to a multiple of `size`.

    torch's DistributedSampler does the same for `size` ranks.
    """
    return torch.cat([order, order[: -len(order) % size]])


def padded_count(count: int, size: int) -> int:
    """Return the number of samples of a padded order."""
    return count + -count % size


def batches(order: Tensor, batch_size: int, *, drop_last: bool = False) -> list[Tensor]:
    """Cut an order into batches; the last one may be shorter, unless it is dropped."""
    parts = list(order.split(batch_size))
    return [part for part in parts if len(part) == batch_size] if drop_last else parts


def batch_count(count: int, batch_size: int, *, drop_last: bool = False) -> int:
    """Return the number of batches of an epoch."""
    return count // batch_size if drop_last else -(-count // batch_size)


@contextmanager
def random_numbers(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator inside the context, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
