"""What is saved on a device comes back as it was, over host memory and disk; on a GPU where there is one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.spool.spool_devices import LateCopier
from tests.support.spool.spool_fuzz import failure
from tests.support.spool.spool_models import outcome
from tests.unit.spool.steps import (
    are_equal,
    gradients,
    open_spool,
    small_model,
)
from trocar_server.spool import SavedTensorChangedError, Spool
from trocar_server.spool.blocks.device_tier import DeviceTier

Context = AbstractContextManager[Any]

BUDGETS = pytest.mark.parametrize("budget_bytes", [0, 6_000, 1 << 30], ids=["disk", "some disk", "host"])
WINDOWS = pytest.mark.parametrize("window_bytes", [0, 5_000, 1 << 30])


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
        assert tier_of(spool).live == {}
        assert tier_of(spool).on_device_bytes == 0


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


@BUDGETS
@pytest.mark.parametrize("device_bytes", [2_400, 10_000, 1 << 30])
def test_the_last_tensors_of_a_pass_stay_on_the_device(
    copier: LateCopier, tmp_path: Path, budget_bytes: int, device_bytes: int
) -> None:
    def work(context: Context) -> list[torch.Tensor]:
        x = leaf()
        with context:
            loss = chain(x)
        loss.backward()
        assert x.grad is not None
        return [x.grad]

    expected, offloaded = work(nullcontext()), []
    with open_spool(tmp_path, budget_bytes, min_bytes=0, device_bytes=device_bytes) as spool:
        for _ in range(4):
            before = spool.report().offloaded_bytes
            assert are_equal(work(spool), expected)
            offloaded.append(spool.report().offloaded_bytes - before)
    first, *later = offloaded
    assert len(set(later)) == 1
    assert later[0] == max(0, first - device_bytes // 2_400 * 2_400)


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


# --- On a GPU -------------------------------------------------------------------------------------


def _delay(output: torch.Tensor, cycles: int) -> None:
    torch.cuda._sleep(cycles)
    output.register_hook(lambda _: torch.cuda._sleep(cycles))


def _on_gpu(spool: Context, delay_cycles: int = 0) -> tuple[list[torch.Tensor], int]:
    """Train three steps; a delay keeps the device behind: what waits for nothing then reads rubbish."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512))]
    model = nn.Sequential(*layers).cuda()
    if delay_cycles:
        for layer in model:
            layer.register_forward_hook(lambda *given: _delay(given[2], delay_cycles))
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


@pytest.mark.cuda
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


@pytest.mark.cuda
@pytest.mark.parametrize("is_own_stream", [False, True])
@pytest.mark.parametrize("budget_bytes", [0, 1 << 34])
def test_delayed_copies_wait_on_the_stream_that_computes(
    tmp_path: Path, budget_bytes: int, is_own_stream: bool
) -> None:
    """Copies are queued long before the device gets to the values, also from a stream of the caller's own."""
    expected, _ = _on_gpu(nullcontext())
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if is_own_stream else torch.cuda.current_stream()
    with open_spool(tmp_path, budget_bytes, device_ahead_bytes=32 << 20) as spool, torch.cuda.stream(stream):
        found, _ = _on_gpu(spool, delay_cycles=2_000_000)
        assert spool.report().offloaded_bytes > 0
    assert are_equal(found, expected)


@pytest.mark.cuda
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
