"""A pass ends at the next module when its guard says so."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models.odd_models import Transformer
from tests.support.models.tiny_models import Plain
from tests.support.servers.footprint import hook_count
from tests.support.servers.serving import rebuilt
from trocar_api.reasons import ErrorReason
from trocar_server.surgery import PassAborted, PassGuard

BATCH = torch.zeros(1, 3, 8, 8)


def test_a_pass_with_a_new_guard_runs_to_its_end() -> None:
    model = Plain()
    with PassGuard().watching(model):
        assert model(BATCH).shape == (1, 5)


def test_a_cancelled_pass_does_not_begin() -> None:
    model, guard = Plain(), PassGuard()
    guard.cancel()
    with guard.watching(model), pytest.raises(PassAborted) as caught:
        model(BATCH)
    assert caught.value.reason is ErrorReason.CANCELLED


def test_a_pass_ends_when_its_deadline_is_over() -> None:
    model = Plain()
    with PassGuard(deadline=time.monotonic() - 1).watching(model), pytest.raises(PassAborted) as caught:
        model(BATCH)
    assert caught.value.reason is ErrorReason.DEADLINE_EXCEEDED


def test_a_cancel_in_the_middle_stops_before_the_next_module() -> None:
    model, guard = Plain(), PassGuard()
    called: list[str] = []
    model.relu.register_forward_hook(lambda *_: guard.cancel())
    model.conv2.register_forward_hook(lambda *_: called.append("conv2"))
    with guard.watching(model), pytest.raises(PassAborted):
        model(BATCH)
    assert not called


def test_a_models_own_except_does_not_keep_an_aborted_pass_alive() -> None:
    class Swallows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: torch.Tensor) -> Any:
            try:
                return self.inner(x)
            except Exception:  # noqa: BLE001 - what bad models do
                return x

    model, guard = Swallows(), PassGuard()
    model.register_forward_pre_hook(lambda *_: guard.cancel())
    with pytest.raises(PassAborted), guard.watching(model):
        model(BATCH)


def test_a_module_that_is_registered_twice_is_guarded_wherever_it_is_called() -> None:
    shared = nn.ReLU()
    model, guard = nn.Sequential(nn.Sequential(shared), shared), PassGuard()
    calls: list[int] = []
    shared.register_forward_hook(lambda *_: calls.append(1))
    shared.register_forward_hook(lambda *_: guard.cancel())
    with guard.watching(model), pytest.raises(PassAborted):
        model(BATCH)
    assert calls == [1]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_the_guard_leaves_no_hook(is_cancelled: bool) -> None:
    model, guard = Plain(), PassGuard()
    if is_cancelled:
        guard.cancel()
    try:
        with guard.watching(model):
            model(BATCH)
    except PassAborted:
        assert is_cancelled
    assert hook_count(model) == 0


def test_a_guard_does_not_change_the_numbers_of_torchs_fused_encoder() -> None:
    """It leaves its fused path where it sees a hook."""
    model, batch = rebuilt(Transformer), torch.rand(2, 5, 16)
    with torch.inference_mode():
        expected = model(batch)
        with PassGuard().watching(model):
            assert torch.equal(model(batch), expected)
