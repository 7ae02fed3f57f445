import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trocar_server.tensors.bits import same_bits
from trocar_server.training.features.feature_cache import CachePlan, FeatureCache, NoCacheError
from trocar_server.training.losses.batch import Batch


def plan_of(folder: Path, **changes: Any) -> CachePlan:
    values: dict[str, Any] = {
        "count": 11,
        "batch_size": 4,
        "epochs": 3,
        "is_shuffled": True,
        "drop_last": False,
        "memory_bytes": 1 << 20,
        "disk_bytes": 1 << 20,
        "scratch_dir": folder,
    }
    return CachePlan(**(values | changes))


class Source:
    """Samples, and a prefix that counts its batches."""

    def __init__(self, prefix: Any, count: int = 11) -> None:
        self.images = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
        self.labels = torch.arange(count)
        self.sizes: list[int] = []
        self._prefix = prefix

    def load(self, indices: Tensor) -> Batch:
        return Batch((self.images[indices],), {}, {"": self.labels[indices]}, len(indices))

    def prefix(self, images: Tensor) -> tuple[Tensor, ...]:
        self.sizes.append(len(images))
        result = self._prefix(images)
        return result if isinstance(result, tuple) else (result,)


def filled(source: Source, plan: CachePlan) -> FeatureCache:
    cache = FeatureCache(plan, source.prefix, source.load)
    for done, total in cache.fill():
        assert 0 < done <= total == plan.count
    return cache


@pytest.mark.parametrize("memory", [1 << 20, 60, 0])
def test_features_and_targets_are_those_of_the_prefix(tmp_path: Path, memory: int) -> None:
    source = Source(lambda x: (x.exp(), x.bfloat16() * 3))
    cache = filled(source, plan_of(tmp_path, memory_bytes=memory))
    for size in (4, 3):
        indices = torch.tensor([9, 0, 5, 3])[:size]
        batch = cache.batch(indices)
        assert batch is not None
        assert torch.equal(batch.args[0], source.images[indices].exp())
        assert torch.equal(batch.args[1], source.images[indices].bfloat16() * 3)
        assert torch.equal(batch.targets[""], indices)
        assert batch.size == size
    assert cache.byte_count == 11 * (12 + 6 + 8)
    assert (cache.disk_byte_count > 0) is (memory < 1 << 20)
    assert not any(tmp_path.iterdir())
    cache.close()


def test_every_batch_is_memory_of_its_own(tmp_path: Path) -> None:
    cache = filled(Source(lambda x: x.exp()), plan_of(tmp_path))
    indices = torch.arange(4)
    first = cache.batch(indices)
    assert first is not None
    expected = first.args[0].clone()
    first.args[0].zero_()
    second = cache.batch(indices)
    assert second is not None
    assert torch.equal(second.args[0], expected)


def test_last_batch_of_the_fill_is_padded_to_the_full_size(tmp_path: Path) -> None:
    source = Source(lambda x: x * 2)
    filled(source, plan_of(tmp_path))
    assert source.sizes[:3] == [4, 4, 4]


def test_dependence_on_the_place_is_refused(tmp_path: Path) -> None:
    source = Source(lambda x: x + torch.arange(len(x)).reshape(-1, 1) * 1e-7)
    with pytest.raises(NoCacheError, match="place"):
        filled(source, plan_of(tmp_path))


def test_dependence_on_the_neighbours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoCacheError, match="beside"):
        filled(Source(lambda x: x - x.mean(0)), plan_of(tmp_path))


def test_random_prefix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoCacheError, match="random"):
        filled(Source(lambda x: x + torch.rand(3)), plan_of(tmp_path))


def test_prefix_with_gradients_is_refused(tmp_path: Path) -> None:
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(NoCacheError, match="trained"):
        filled(Source(lambda x: x * weight), plan_of(tmp_path))


def of_size(x: Tensor) -> Tensor:
    """As a kernel that is chosen by the size of the batch."""
    return x * 3 if len(x) == 4 else x + x + x * 1.0000001


def test_last_batch_of_other_bits_gets_rows_of_its_own(tmp_path: Path) -> None:
    source = Source(of_size)
    cache = filled(source, plan_of(tmp_path, epochs=100))
    indices = torch.tensor([10, 2, 4])
    batch = cache.batch(indices)
    assert batch is not None
    assert torch.equal(batch.args[0], of_size(source.images[indices]))
    whole = cache.batch(torch.tensor([1, 10, 2, 4]))
    assert whole is not None
    assert torch.equal(whole.args[0][1:], source.images[indices] * 3)
    assert cache.byte_count == 2 * 11 * (12 + 8)


def test_last_batch_runs_without_where_rows_of_its_own_cost_more(tmp_path: Path) -> None:
    cache = filled(Source(of_size), plan_of(tmp_path, epochs=2))
    assert cache.batch(torch.arange(3)) is None
    assert cache.batch(torch.arange(4)) is not None


def test_dropped_last_batch_needs_no_probe(tmp_path: Path) -> None:
    source = Source(of_size)
    filled(source, plan_of(tmp_path, drop_last=True))
    assert set(source.sizes) == {4}


def test_batches_in_their_own_order_are_kept_as_they_are(tmp_path: Path) -> None:
    source = Source(lambda x: x - x.mean(0))  # depends on the neighbours, which are always the same
    cache = filled(source, plan_of(tmp_path, is_shuffled=False))
    for indices in torch.arange(11).split(4):
        batch = cache.batch(indices)
        assert batch is not None
        images = source.images[indices]
        assert torch.equal(batch.args[0], images - images.mean(0))
    assert source.sizes == [4, 4, 3]


def test_fewer_samples_than_a_batch_are_one_batch(tmp_path: Path) -> None:
    source = Source(lambda x: x * 2, count=3)
    cache = filled(source, plan_of(tmp_path, count=3, batch_size=8))
    batch = cache.batch(torch.tensor([2, 0, 1]))
    assert batch is not None
    assert torch.equal(batch.args[0], source.images[[2, 0, 1]] * 2)


@pytest.mark.parametrize(
    "strided",
    [
        lambda x: torch.stack([x, x + 1], 1)[:, 1],
        lambda x: x.repeat(1, 4).reshape(-1, 3, 2, 2).to(memory_format=torch.channels_last),
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x], 1)[:, 2:5],
    ],
    ids=["slice", "channels_last", "transposed", "offset"],
)
def test_features_lie_in_memory_as_they_did(tmp_path: Path, strided: Any) -> None:
    source = Source(strided)
    cache = filled(source, plan_of(tmp_path))
    for indices in (torch.tensor([7, 1, 0, 2]), torch.tensor([3, 9, 8])):
        batch, expected = cache.batch(indices), strided(source.images[indices])
        assert batch is not None
        assert torch.equal(batch.args[0], expected)
        assert batch.args[0].stride() == expected.stride()
        assert batch.args[0].storage_offset() == expected.storage_offset()


def test_nan_is_equal_to_itself_and_zeros_differ_by_sign(tmp_path: Path) -> None:
    cache = filled(Source(lambda x: x * float("nan")), plan_of(tmp_path))
    batch = cache.batch(torch.arange(4))
    assert batch is not None
    assert batch.args[0].isnan().all()
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_budgets_are_kept_before_anything_is_filled(tmp_path: Path) -> None:
    source = Source(lambda x: x * 2)
    with pytest.raises(NoCacheError, match="220 bytes"):
        filled(source, plan_of(tmp_path, memory_bytes=100, disk_bytes=50))
    assert source.sizes == [4]


def test_full_disk_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoCacheError, match="disk is full"):
        filled(Source(lambda x: x * 2), plan_of(tmp_path, memory_bytes=0))
    assert not any(tmp_path.iterdir())
