"""Tensors of a device go to host memory and come back in time; with a device whose copies are done late."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.spool_devices import LateCopier, all_tensors_on_a_device
from tests.support.spool_fuzz import failure
from tests.support.spool_models import outcome
from tests.unit.spool.steps import (
    are_equal,
    files,
    gradients,
    open_spool,
    small_model,
    wait_until_written,
)
from trocar_server.spool import SavedTensorChangedError, Spool
from trocar_server.spool.device_copies import copier_of
from trocar_server.spool.device_tier import DeviceTier, Tiers
from trocar_server.spool.saved import Kept, Saved

Context = AbstractContextManager[Any]

BUDGETS = pytest.mark.parametrize("budget_bytes", [0, 6_000, 1 << 30], ids=["disk", "some disk", "host"])
WINDOWS = pytest.mark.parametrize("window_bytes", [0, 5_000, 1 << 30])


@pytest.fixture
def copier() -> Iterator[LateCopier]:
    with all_tensors_on_a_device() as found:
        yield found


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, 600).reshape(20, 30).requires_grad_()


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = (x * 1.5).tanh() * x.sigmoid()
    return x.square().sum()


def tier_of(spool: Spool) -> DeviceTier:
    tier = spool._packer._tiers.home_of(torch.device("cpu"))
    assert isinstance(tier, DeviceTier)
    return tier


def same(work: Callable[[Context], list[torch.Tensor]], spool: Spool) -> bool:
    expected = work(nullcontext())
    return all(are_equal(work(spool), expected) for _ in range(3))


# --- Values ---------------------------------------------------------------------------------------


@BUDGETS
@WINDOWS
def test_gradients_are_the_same_bits(
    copier: LateCopier, tmp_path: Path, budget_bytes: int, window_bytes: int
) -> None:
    def work(context: Context) -> list[torch.Tensor]:
        x = leaf()
        with context:
            loss = chain(x)
        loss.backward(retain_graph=True)
        loss.backward()
        assert x.grad is not None
        return [x.grad]

    options = {"min_bytes": 0, "device_ahead_bytes": window_bytes, "ahead_bytes": 5_000}
    with open_spool(tmp_path, budget_bytes, **options) as spool:
        assert same(work, spool)
        assert spool.report().peak_bytes <= budget_bytes + leaf().nbytes
        assert ("up", leaf().nbytes) in copier.log
        assert tier_of(spool)._live == {}
        assert tier_of(spool)._back_bytes == 0


@BUDGETS
def test_a_model_trains_as_without(copier: LateCopier, tmp_path: Path, budget_bytes: int) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path, budget_bytes, device_ahead_bytes=100_000, keep=[model]) as spool:
        for _ in range(3):
            assert are_equal(gradients(model, spool), expected)
        report = spool.report()
        assert report.offloaded_bytes == report.unique_bytes > 0
        assert (report.written_bytes > 0) == (budget_bytes < 1 << 30)


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "raft_small"])
def test_torchvision_models_train_as_without(copier: LateCopier, tmp_path: Path, name: str) -> None:
    found = outcome(name, tmp_path)
    assert (found.error, found.skipped) == (None, None)
    assert copier.log


@pytest.mark.parametrize("first", range(2000, 2030, 10))
def test_random_programs_come_to_the_same(copier: LateCopier, tmp_path: Path, first: int) -> None:
    found = {seed: failure(seed, tmp_path) for seed in range(first, first + 10)}
    assert not {seed: text for seed, text in found.items() if text is not None}


def test_second_derivatives_and_views(copier: LateCopier, tmp_path: Path) -> None:
    def work(context: Context) -> list[torch.Tensor]:
        x = leaf()
        with context:
            y = x.exp()
            loss = (y.T[3:] * y.T[:-3]).tanh().sum() + (y[:, ::2] * y[:1, ::2]).square().sum()
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return [first.detach(), second]

    with open_spool(tmp_path, 3_000, min_bytes=0, device_ahead_bytes=4_000) as spool:
        assert same(work, spool)


def test_a_change_in_place_raises(copier: LateCopier, tmp_path: Path) -> None:
    with open_spool(tmp_path, 0, min_bytes=0) as spool:
        x = leaf()
        with spool:
            y = x.exp()
            z = y.tanh() * y
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(SavedTensorChangedError):
            z.sum().backward()


# --- On the way to the host -----------------------------------------------------------------------


def pack(spool: Spool, count: int = 1) -> list[Saved]:
    found = [spool._packer.pack(torch.randn(1000)) for _ in range(count)]
    assert all(isinstance(each, Saved) for each in found)
    return [each for each in found if isinstance(each, Saved)]


def test_few_bytes_are_under_way_at_a_time(copier: LateCopier, tmp_path: Path) -> None:
    with open_spool(tmp_path, 1 << 30, device_ahead_bytes=10_000) as spool:
        held = pack(spool, 20)
        assert copier.most_leaving_bytes == 8_000
    assert len(held) == 20


def test_a_source_lives_until_it_is_copied_and_no_longer(copier: LateCopier, tmp_path: Path) -> None:
    with open_spool(tmp_path, 1 << 30) as spool:
        tensor = torch.randn(1000)
        source = StorageWeakRef(tensor.untyped_storage())
        held = [spool._packer.pack(tensor)]
        del tensor
        assert not source.expired()
        copier.run()
        held += pack(spool)
        assert source.expired()


def test_what_is_written_is_what_was_saved(copier: LateCopier, tmp_path: Path) -> None:
    with open_spool(tmp_path, 0) as spool:
        tensors = [torch.randn(1000) for _ in range(4)]
        held = [spool._packer.pack(tensor) for tensor in tensors]
        wait_until_written(spool)
        (path,) = files(tmp_path)
        written = [tensor for _, tensor in sorted(load_file(path).items()) if tensor.dtype is torch.float32]
        assert are_equal(written, tensors)
        assert len(held) == 4


def test_a_storage_is_copied_once(copier: LateCopier, tmp_path: Path) -> None:
    with open_spool(tmp_path, 1 << 30) as spool:
        tensor = torch.randn(40, 50)
        held = [spool._packer.pack(each) for each in (tensor, tensor.T, tensor[1:], tensor)]
        assert copier.log == [("down", tensor.nbytes)]
        expected = [tensor, tensor.T, tensor[1:], tensor]
        values = [each.clone() for each in expected]
        del tensor, expected
        copier.run()
        pack(spool)
        assert are_equal([each.unpack() for each in held], values)
        assert [kind for kind, _ in copier.log].count("up") == 1


# --- On the way back ------------------------------------------------------------------------------


def forgotten(spool: Spool, copier: LateCopier, count: int) -> list[Saved]:
    """Blocks whose sources are gone."""
    held = pack(spool, count)
    copier.run(100)
    with tier_of(spool):
        pass
    copier.log.clear()
    return held


def test_the_next_ones_come_in_reverse_order_within_the_window(copier: LateCopier, tmp_path: Path) -> None:
    with open_spool(tmp_path, 1 << 30, device_ahead_bytes=12_000) as spool:
        held = forgotten(spool, copier, 6)
        tier = tier_of(spool)
        numbers = [each._block.number for each in held]
        held[5].unpack()
        assert list(tier._back) == [numbers[5], numbers[4], numbers[3]]
        held[4].unpack()
        assert list(tier._back) == [numbers[4], numbers[3], numbers[2]]
        del held[4:]
        assert tier._back_bytes == 8_000
        held[3].unpack()
        assert len(copier.log) == 5


def test_one_that_is_larger_than_the_window_comes_alone(copier: LateCopier, tmp_path: Path) -> None:
    with open_spool(tmp_path, 1 << 30, device_ahead_bytes=1_000) as spool:
        held = forgotten(spool, copier, 4)
        for each in reversed(held):
            each.unpack()
            assert len(tier_of(spool)._back) <= 2  # the one in use, and none or one more
        assert len(copier.log) == 4


def test_what_is_alive_on_the_device_is_used_from_there(copier: LateCopier, tmp_path: Path) -> None:
    with open_spool(tmp_path, 0) as spool:
        tensor = torch.randn(1000)
        held = spool._packer.pack(tensor)
        copier.run()
        pack(spool, 2)
        wait_until_written(spool)
        assert held.unpack().data_ptr() == tensor.data_ptr()
        assert [kind for kind, _ in copier.log] == ["down"] * 3
        assert spool.report().read_bytes == 0


def test_what_is_on_disk_comes_over_the_host(copier: LateCopier, tmp_path: Path) -> None:
    with open_spool(tmp_path, 0, device_ahead_bytes=12_000) as spool:
        tensors = [torch.randn(1000) for _ in range(6)]
        held = [spool._packer.pack(tensor) for tensor in tensors]
        values = [tensor.clone() for tensor in tensors]
        tensors.clear()
        wait_until_written(spool)
        forgotten(spool, copier, 1)
        assert are_equal([each.unpack() for each in reversed(held)], values[::-1])
        assert spool.report().read_bytes > 0


def test_a_graph_that_is_dropped_leaves_nothing(copier: LateCopier, tmp_path: Path) -> None:
    with open_spool(tmp_path, 6_000, min_bytes=0) as spool:
        for _ in range(3):
            with spool:
                loss = chain(leaf())
            del loss
        copier.run(1000)
        tier = tier_of(spool)
        with tier:
            pass
        assert (tier._live, tier._back, list(tier._leaving), tier._leaving_bytes) == ({}, {}, [], 0)
        assert spool._store._ledger.is_empty


def test_the_garbage_collector_may_come_while_the_lock_is_held(copier: LateCopier, tmp_path: Path) -> None:
    class Cycle:
        def __init__(self, held: object) -> None:
            self.me, self.held = self, held

    with open_spool(tmp_path, 1 << 30) as spool:
        for each in pack(spool, 5):
            Cycle(each)
        del each
        tier = tier_of(spool)
        with tier:
            gc.collect()
            assert len(tier._live) == 5
        assert tier._live == {}


def test_threads_save_and_ask_at_once(copier: LateCopier, tmp_path: Path) -> None:
    errors: list[str] = []

    def train(seed: int) -> None:
        x = (leaf().detach() + seed).requires_grad_()
        expected = torch.autograd.grad(chain(x), x)[0]
        for _ in range(5):
            with spool:
                loss = chain(x)
            if not torch.equal(torch.autograd.grad(loss, x)[0], expected):
                errors.append(f"thread {seed}")

    with open_spool(tmp_path, 6_000, min_bytes=0, device_ahead_bytes=5_000) as spool:
        threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []
        assert tier_of(spool)._live == {}


def test_a_spool_goes_with_its_last_graph(copier: LateCopier, tmp_path: Path) -> None:
    def forward() -> torch.Tensor:
        with Spool(tmp_path, 0, min_bytes=0):
            return chain(leaf())

    loss = forward()
    loss.backward()
    del loss
    assert files(tmp_path) == []


# --- Which devices --------------------------------------------------------------------------------


def test_host_memory_has_no_tier_and_other_devices_stay(tmp_path: Path) -> None:
    with open_spool(tmp_path) as spool:
        tiers = Tiers(spool._store, 0, copier_of)
        assert tiers.home_of(torch.device("cpu")) is spool._store
        assert tiers.home_of(torch.device("meta")) is None
        assert isinstance(spool._packer.pack(torch.empty(1000, device="meta")), Kept)


def test_negative_windows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        Spool(tmp_path, 0, device_ahead_bytes=-1)


# --- On a GPU -------------------------------------------------------------------------------------

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _on_gpu(spool: Context) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512))]
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(8192, 512, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        model.zero_grad()
        with spool:
            loss = model(x).square().mean()
        loss.backward()
    torch.cuda.synchronize()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return found, torch.cuda.max_memory_allocated() - before


@CUDA
@pytest.mark.parametrize("budget_bytes", [0, 64 << 20, 1 << 34])
def test_gradients_on_a_gpu_are_the_same_bits_with_less_of_its_memory(
    tmp_path: Path, budget_bytes: int
) -> None:
    expected, most_bytes = _on_gpu(nullcontext())
    with open_spool(tmp_path, budget_bytes, device_ahead_bytes=32 << 20) as spool:
        found, bytes_with = _on_gpu(spool)
        assert are_equal(found, expected)
        assert bytes_with < most_bytes / 2
        assert spool.report().offloaded_bytes > 0


@CUDA
def test_tensors_of_both_memories_share_the_budget(tmp_path: Path) -> None:
    def work(context: Context) -> list[torch.Tensor]:
        x = leaf()
        with context:
            loss = chain(x.cuda()).cpu() + chain(x)
        loss.backward()
        assert x.grad is not None
        return [x.grad]

    with open_spool(tmp_path, 4_000, min_bytes=0) as spool:
        assert same(work, spool)
        assert spool.report().peak_bytes <= 4_000 + leaf().nbytes
