"""A pass ends at the next module when its guard says so."""

import time

import pytest
import torch
from torch import nn

from tests.support.tiny_models import Plain
from trocar_api.reasons import ErrorReason
from trocar_server.surgery import PassAborted, PassGuard, install_guard

BATCH = torch.zeros(1, 3, 8, 8)


def test_a_pass_with_a_new_guard_runs_to_its_end() -> None:
    model = Plain()
    install_guard(model)
    assert model(BATCH).shape == (1, 5)


def test_a_cancelled_pass_does_not_begin() -> None:
    model = Plain()
    slot = install_guard(model)
    slot.guard.cancel()
    with pytest.raises(PassAborted) as caught:
        model(BATCH)
    assert caught.value.reason is ErrorReason.CANCELLED


def test_a_pass_ends_when_its_deadline_is_over() -> None:
    model = Plain()
    install_guard(model).guard = PassGuard(deadline=time.monotonic() - 1)
    with pytest.raises(PassAborted) as caught:
        model(BATCH)
    assert caught.value.reason is ErrorReason.DEADLINE_EXCEEDED


def test_a_cancel_in_the_middle_stops_before_the_next_module() -> None:
    model = Plain()
    slot = install_guard(model)
    called: list[str] = []
    model.relu.register_forward_hook(lambda *_: slot.guard.cancel())
    model.conv2.register_forward_hook(lambda *_: called.append("conv2"))
    with pytest.raises(PassAborted):
        model(BATCH)
    assert not called


def test_a_models_own_except_does_not_keep_an_aborted_pass_alive() -> None:
    class Swallows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.inner(x)
            except Exception:  # noqa: BLE001 - what bad models do
                return x

    model = Swallows()
    slot = install_guard(model)
    model.register_forward_pre_hook(lambda *_: slot.guard.cancel())
    with pytest.raises(PassAborted):
        model(BATCH)


def test_every_module_is_guarded_once_even_when_it_is_registered_twice() -> None:
    shared = nn.ReLU()
    model = nn.Sequential(shared, nn.Sequential(shared), nn.Tanh())
    install_guard(model)
    assert [len(child._forward_pre_hooks) for child in model.modules()] == [1, 1, 1, 1]
