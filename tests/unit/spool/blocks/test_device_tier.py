"""Tensors of a device go to host memory and come back in time; with a device whose copies are done late."""

import gc
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.spool.spool_devices import LateCopier
from tests.unit.spool.steps import (
    are_equal,
    files,
    open_spool,
    wait_until_written,
)
from trocar_server.spool import Spool
from trocar_server.spool.blocks.device_copies import copier_of
from trocar_server.spool.blocks.device_tier import DeviceTier, Tiers
from trocar_server.spool.saved.saved import Kept, Saved

Context = AbstractContextManager[Any]


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, 600).reshape(20, 30).requires_grad_()


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = (x * 1.5).tanh() * x.sigmoid()
    return x.square().sum()


def tier_of(spool: Spool) -> DeviceTier:
    tier = spool.packer.tiers.home_of(torch.device("cpu"))
    assert isinstance(tier, DeviceTier)
    return tier


# --- On the way to the host -----------------------------------------------------------------------


def pack(spool: Spool, count: int = 1) -> list[Saved]:
    found = [spool.packer.pack(torch.randn(1000)) for _ in range(count)]
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
        held = [spool.packer.pack(tensor)]
        del tensor
        assert not source.expired()
        copier.run()
        held += pack(spool)
        assert source.expired()


def test_what_is_written_is_what_was_saved(copier: LateCopier, tmp_path: Path) -> None:
    with open_spool(tmp_path, 0) as spool:
        tensors = [torch.randn(1000) for _ in range(4)]
        held = [spool.packer.pack(tensor) for tensor in tensors]
        wait_until_written(spool)
        (path,) = files(tmp_path)
        written = [tensor for _, tensor in sorted(load_file(path).items()) if tensor.dtype is torch.float32]
        assert are_equal(written, tensors)
        assert len(held) == 4


def test_a_storage_is_copied_once(copier: LateCopier, tmp_path: Path) -> None:
    with open_spool(tmp_path, 1 << 30) as spool:
        tensor = torch.randn(40, 50)
        held = [spool.packer.pack(each) for each in (tensor, tensor.T, tensor[1:], tensor)]
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
        numbers = [each.block.number for each in held]
        held[5].unpack()
        assert list(tier.on_device) == [numbers[5], numbers[4], numbers[3]]
        held[4].unpack()
        assert list(tier.on_device) == [numbers[4], numbers[3], numbers[2]]
        del held[4:]
        assert tier.on_device_bytes == 8_000
        held[3].unpack()
        assert len(copier.log) == 5


def test_one_that_is_larger_than_the_window_comes_alone(copier: LateCopier, tmp_path: Path) -> None:
    with open_spool(tmp_path, 1 << 30, device_ahead_bytes=1_000) as spool:
        held = forgotten(spool, copier, 4)
        for each in reversed(held):
            each.unpack()
            assert len(tier_of(spool).on_device) <= 2  # the one in use, and none or one more
        assert len(copier.log) == 4


def test_what_is_alive_on_the_device_is_used_from_there(copier: LateCopier, tmp_path: Path) -> None:
    with open_spool(tmp_path, 0) as spool:
        tensor = torch.randn(1000)
        held = spool.packer.pack(tensor)
        copier.run()
        pack(spool, 2)
        wait_until_written(spool)
        assert held.unpack().data_ptr() == tensor.data_ptr()
        assert [kind for kind, _ in copier.log] == ["down"] * 3
        assert spool.report().read_bytes == 0


def test_what_is_on_disk_comes_over_the_host(copier: LateCopier, tmp_path: Path) -> None:
    with open_spool(tmp_path, 0, device_ahead_bytes=12_000) as spool:
        tensors = [torch.randn(1000) for _ in range(6)]
        held = [spool.packer.pack(tensor) for tensor in tensors]
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
        assert (tier.live, tier.on_device, list(tier.departures), tier.departing_bytes) == ({}, {}, [], 0)
        assert spool.store.ledger.is_empty


def test_the_garbage_collector_may_come_while_the_lock_is_held(copier: LateCopier, tmp_path: Path) -> None:
    class Cycle:
        def __init__(self, held: object) -> None:
            self.me, self.held = self, held

    with open_spool(tmp_path, 1 << 30) as spool:
        for _ in range(5):
            Cycle(pack(spool)[0])
        tier = tier_of(spool)
        with tier:
            gc.collect()
            assert len(tier.live) == 5
        assert tier.live == {}


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
        assert tier_of(spool).live == {}


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
        tiers = Tiers(spool.store, 0, copier_of)
        assert tiers.home_of(torch.device("cpu")) is spool.store
        assert tiers.home_of(torch.device("meta")) is None
        assert isinstance(spool.packer.pack(torch.empty(1000, device="meta")), Kept)


def test_negative_windows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        Spool(tmp_path, 0, device_ahead_bytes=-1)
