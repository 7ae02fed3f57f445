"""In which order a fit takes its samples; anyone can rebuild it from the seed.

for indices in batches(epoch_order(len(data), seed=0, epoch=2), batch_size=32):
    ...
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def epoch_order(count: int, seed: int, epoch: int, *, shuffle: bool = True) -> Tensor:
    """Return the samples of an epoch in order, int64 (count,).

    Shuffled it is `torch.randperm(count, generator=G)`, G a CPU generator seeded with `seed + epoch`.
    """
    if not shuffle:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(count, generator=generator)


def batches(order: Tensor, batch_size: int, *, drop_last: bool = False) -> list[Tensor]:
    """Cut an order into batches; the last one may be shorter, unless it is dropped."""
    parts = list(order.split(batch_size))
    return [part for part in parts if len(part) == batch_size] if drop_last else parts


def batch_count(count: int, batch_size: int, *, drop_last: bool = False) -> int:
    """Return how many batches an epoch has."""
    return count // batch_size if drop_last else -(-count // batch_size)


@contextmanager
def random_numbers(seed: int) -> Iterator[None]:
    """Let torch's CPU random numbers inside the context begin with a seed, and put them back after it."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
