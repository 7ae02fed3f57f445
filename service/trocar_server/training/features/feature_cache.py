"""Feature cache: outputs of a frozen prefix, so that later epochs only cost the trained part.

    cache = FeatureCache(plan, split.prefix, load)
    for done, total in cache.fill():        # one batch of samples each time
        ...
    batch = cache.batch(indices)            # inputs of split.tail, and targets; None: not cached

# Note: [Bit-equality check of the cache]
A sample's features may depend on the batch size, because it selects the kernel, and even on the sample's
position in the batch. So the cache is filled in batches of the fit's own size, the last one padded with
repeated samples. Then other batches, in random order, are computed and compared bit by bit. The last batch
of an epoch is smaller: if its features would differ it gets rows of its own, or runs without the cache if
that costs less. Batches that are the same in every epoch need none of this: they are cached unchanged.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trocar_server.tensors.bits import same_bits
from trocar_server.training.datasets.order import batches
from trocar_server.training.features.feature_store import FeatureStore, MemoryLayout, NoRoomError
from trocar_server.training.features.trial_run import random_state
from trocar_server.training.losses.batch import Batch

_PROBES = 2

Prefix = Callable[..., Sequence[Tensor]]
Load = Callable[[Tensor], Batch]


class NoCacheError(Exception):
    """Features cannot be cached bit-equal, or not at all; the message is for people."""


def positional_tensors(batch: Batch) -> tuple[Tensor, ...]:
    """Return the arguments of a batch by position, as the parts of a split forward take them.

    Raises:
        NoCacheError: They are not tensors by position, or one by name: a data set's own.
    """
    values = batch.args or tuple(batch.kwargs.values())
    is_one_form = not batch.kwargs if batch.args else len(values) == 1
    if not (is_one_form and all(isinstance(value, Tensor) for value in values)):
        raise NoCacheError("the model's inputs are not one tensor each")
    return values


@dataclass(frozen=True)
class CachePlan:
    """Sizes and budgets of a cache.

    Attributes:
        count: Number of samples.
        batch_size: Samples per batch.
        epochs: Number of epochs that use the cache.
        is_shuffled: Whether batches differ between epochs.
        drop_last: Whether a last, smaller batch is left out.
        memory_bytes: Budget in memory.
        disk_bytes: Budget on disk.
        scratch_dir: Folder for features on disk.
    """

    count: int
    batch_size: int
    epochs: int
    is_shuffled: bool
    drop_last: bool
    memory_bytes: int
    disk_bytes: int
    scratch_dir: Path

    @property
    def size(self) -> int:
        """Samples in a full batch."""
        return min(self.batch_size, self.count)

    @property
    def rest(self) -> int:
        """Samples in the last batch of an epoch; 0 when it is full or left out."""
        return 0 if self.drop_last else self.count % self.size


class FeatureCache:
    """Features of all samples, by batch size.

    Args:
        plan: Its sizes and budgets.
        prefix: Computes the features; called in the contexts of a training step.
        load: Returns samples, with their targets, as the model takes them.

    Attributes:
        byte_count: Bytes of all features.
        disk_byte_count: Bytes of the features on disk.
    """

    def __init__(self, plan: CachePlan, prefix: Prefix, load: Load) -> None:
        self._plan, self._prefix, self._load = plan, prefix, load
        self._stores: dict[int, FeatureStore] = {}
        self._layouts: dict[int, list[MemoryLayout]] = {}
        self._target_names: tuple[str, ...] = ()

    @property
    def byte_count(self) -> int:
        """Bytes of all features."""
        return sum(store.byte_count for store in set(self._stores.values()))

    @property
    def disk_byte_count(self) -> int:
        """Bytes of the features on disk."""
        return sum(store.disk_byte_count for store in set(self._stores.values()))

    def holds(self, size: int) -> bool:
        """Whether there are features for batches of a size."""
        return size in self._stores

    def batch(self, indices: Tensor) -> Batch | None:
        """Return features and targets of samples, or None if batches of this size are not cached."""
        values = self._values(indices)
        if values is None:
            return None
        first_target = len(values) - len(self._target_names)
        targets = dict(zip(self._target_names, values[first_target:], strict=True))
        return Batch(tuple(values[:first_target]), {}, targets, len(indices))

    def example(self) -> Tensor:
        """Return the indices of a typical full batch."""
        order = torch.arange(self._plan.size)
        return order.flip(0) if self._plan.is_shuffled else order

    def fill(self) -> Generator[tuple[int, int], None, None]:
        """Compute the features, a batch at a time; yields the samples done and their total.

        Raises:
            NoCacheError: They cannot be cached. The cache is empty then.
        """
        try:
            if self._plan.is_shuffled:
                yield from self._fill_any_order()
            else:
                yield from self._fill_same_order()
        except NoRoomError as error:
            self.close()
            raise NoCacheError(str(error)) from None
        except NoCacheError:
            self.close()
            raise

    def close(self) -> None:
        """Free memory and disk."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()

    def _fill_any_order(self) -> Generator[tuple[int, int], None, None]:
        plan = self._plan
        yield from self._fill_size(plan.size)
        for probe in range(_PROBES):
            self._compare(self._random_batch(plan.size, probe), "of its place in the batch")
        if not plan.rest:
            return
        indices = self._random_batch(plan.rest, _PROBES)
        values = self._compute(indices)
        self._layouts[plan.rest] = [MemoryLayout.of(value) for value in values]
        self._stores[plan.rest] = self._stores[plan.size]
        if self._is_equal(indices, values):
            return
        del self._stores[plan.rest]
        if plan.rest * plan.epochs <= plan.count:
            return  # running the last batches uncached costs less than rows of their own
        yield from self._fill_size(plan.rest)
        for probe in range(_PROBES):
            self._compare(self._random_batch(plan.rest, probe), "of its place in the batch")

    def _fill_size(self, size: int) -> Generator[tuple[int, int], None, None]:
        """Fill the rows for one batch size."""
        count = self._plan.count
        for indices in batches(torch.arange(count), size):
            missing = size - len(indices)
            padded = torch.cat([indices, torch.arange(missing) % count]) if missing else indices
            values = self._compute(padded)
            self._keep(size, indices, [value[: len(indices)] for value in values], values)
            yield int(indices[-1]) + 1, count

    def _fill_same_order(self) -> Generator[tuple[int, int], None, None]:
        plan = self._plan
        shared: FeatureStore | None = None
        for indices in batches(torch.arange(plan.count), plan.batch_size, drop_last=plan.drop_last):
            values = self._compute(indices)
            if shared is not None:
                self._stores.setdefault(len(indices), shared)
            self._keep(len(indices), indices, values, values)
            shared = self._stores[len(indices)]
            yield int(indices[-1]) + 1, plan.count

    def _keep(self, size: int, indices: Tensor, rows: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        layouts = [MemoryLayout.of(value) for value in values]
        if size not in self._stores:
            plan = self._plan
            in_memory = self.byte_count - self.disk_byte_count
            self._stores[size] = FeatureStore(
                layouts,
                plan.count,
                max(0, plan.memory_bytes - in_memory),
                plan.disk_bytes - self.disk_byte_count,
                plan.scratch_dir,
            )
        if self._layouts.setdefault(size, layouts) != layouts:
            raise NoCacheError("shapes of the features differ from batch to batch")
        self._stores[size].write(indices, rows)

    def _compute(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Return features of samples, followed by their targets."""
        batch = self._load(indices)
        before = random_state()
        values = tuple(self._prefix(*positional_tensors(batch)))
        if random_state() != before:
            raise NoCacheError("the frozen part draws random numbers")
        if any(value.requires_grad for value in values):
            raise NoCacheError("the frozen part depends on something that is trained")
        self._target_names = tuple(batch.targets)
        return values + tuple(batch.targets.values())

    def _values(self, indices: Tensor) -> list[Tensor] | None:
        size = len(indices)
        if size not in self._stores:
            return None
        rows = self._stores[size].read(indices)
        return [layout.laid_out(row) for layout, row in zip(self._layouts[size], rows, strict=True)]

    def _compare(self, indices: Tensor, dependence: str) -> None:
        if not self._is_equal(indices, self._compute(indices)):
            raise NoCacheError(f"a sample's features depend on the samples beside it, or {dependence}")

    def _is_equal(self, indices: Tensor, values: Sequence[Tensor]) -> bool:
        kept = self._values(indices)
        return kept is not None and all(same_bits(a, b) for a, b in zip(kept, values, strict=True))

    def _random_batch(self, size: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randperm(self._plan.count, generator=generator)[:size]
