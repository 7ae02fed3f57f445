"""A call that fails leaves no trace: all is as before, and the next step is that of a run without it."""

import errno
import gc
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models.tiny_models import Plain
from tests.unit.training.trainers import (
    Pair,
    TinyNet,
    assert_same,
    batch_of,
    batches,
    core_of,
    net,
    run,
    tiny,
)
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard
from trocar_server.training.losses.batch import Batch
from trocar_server.training.step.core import TrainerCore

BASE: dict[str, Any] = {
    "optimizer": {"name": "adam", "options": {"lr": 0.01}},
    "schedule": {"name": "cosine", "options": {"T_max": 20}},
    "ema_decay": 0.9,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": BASE,
    "accumulating": {**BASE, "accumulation": 2},
    "checkpointed": {**BASE, "activation_checkpointing": ["block"]},
    "lbfgs": {"optimizer": {"name": "lbfgs", "options": {"lr": 0.5, "max_iter": 4}}, "ema_decay": 0.9},
    "in_backward": {**BASE, "optimizer": {**BASE["optimizer"], "in_backward": True}},
}


class Switch(nn.Module):
    """Does something to a value on its way, or to its gradient on its way back, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_action: Any = None
        self.backward_action: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.forward_action is not None:
            x = self.forward_action(x)
        action = self.backward_action
        if action is not None and x.requires_grad:
            x = x.clone()
            x.register_hook(action)
        return x


class Faulty(TinyNet):
    """A net that can be told to fail, in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.switch = Switch()

    def forward(self, x: Tensor) -> Any:
        x = self.block(self.switch(self.stem(x)))
        return self.fc(self.drop(self.pool(x).flatten(1)))


def fail_with(error: BaseException) -> Any:
    def action(*_: Any, **__: Any) -> Any:
        raise error

    return action


def no_fault(core: TrainerCore, data: Pair) -> None:
    core.step(batch_of(data), PassGuard())


def wrong_shape(core: TrainerCore, data: Pair) -> None:
    core.step(Batch((torch.zeros(4, 5, 8, 8),), {}, {"": data[1]}, 4), PassGuard())


def wrong_label(core: TrainerCore, data: Pair) -> None:
    core.step(Batch((data[0],), {}, {"": torch.tensor([0, 1, 5, 2])}, 4), PassGuard())


def non_finite_input(core: TrainerCore, data: Pair) -> None:
    core.step(Batch((data[0] * float("nan"),), {}, {"": data[1]}, 4), PassGuard())


def cancelled_before(core: TrainerCore, data: Pair) -> None:
    guard = PassGuard()
    guard.cancel()
    core.step(batch_of(data), guard)


def cancelled_in_forward(core: TrainerCore, data: Pair) -> None:
    guard = PassGuard()

    def cancel(x: Tensor) -> Tensor:
        guard.cancel()
        return x

    net(core).switch.forward_action = cancel
    core.step(batch_of(data), guard)


def cancelled_in_backward(core: TrainerCore, data: Pair) -> None:
    guard = PassGuard()
    net(core).switch.backward_action = lambda _: guard.cancel()
    core.step(batch_of(data), guard)


def error_in_forward(core: TrainerCore, data: Pair) -> None:
    net(core).switch.forward_action = fail_with(RuntimeError("no"))
    core.step(batch_of(data), PassGuard())


def out_of_memory_in_backward(core: TrainerCore, data: Pair) -> None:
    net(core).switch.backward_action = fail_with(torch.OutOfMemoryError("too little"))
    core.step(batch_of(data), PassGuard())


def non_finite_gradient(core: TrainerCore, data: Pair) -> None:
    net(core).switch.backward_action = lambda gradient: gradient * float("inf")
    core.step(batch_of(data), PassGuard())


EARLY = [wrong_shape, wrong_label, non_finite_input, cancelled_before, cancelled_in_forward, error_in_forward]
LATE = [cancelled_in_backward, out_of_memory_in_backward, non_finite_gradient]
REASONS = {
    wrong_shape: ErrorReason.INPUT_REJECTED,
    wrong_label: ErrorReason.TARGET_REJECTED,
    non_finite_input: ErrorReason.NON_FINITE_STEP,
    cancelled_before: ErrorReason.CANCELLED,
    cancelled_in_forward: ErrorReason.CANCELLED,
    error_in_forward: ErrorReason.INPUT_REJECTED,
    cancelled_in_backward: ErrorReason.CANCELLED,
    out_of_memory_in_backward: ErrorReason.OUT_OF_MEMORY,
    non_finite_gradient: ErrorReason.NON_FINITE_STEP,
}


@contextmanager
def failing(core: TrainerCore, reason: ErrorReason) -> Iterator[None]:
    """Expect an error, and heal the model behind it."""
    outside = torch.get_rng_state()
    with pytest.raises(ServiceError) as caught:
        yield
    assert caught.value.reason is reason
    assert torch.equal(torch.get_rng_state(), outside)
    net(core).switch.forward_action = net(core).switch.backward_action = None


def assert_same_state(core: TrainerCore, before: Any) -> None:
    after = core.state()
    assert after.facts == before.facts
    assert after.tensors.keys() == before.tensors.keys()
    assert [
        name for name, found in before.tensors.items() if not torch.equal(after.tensors[name], found)
    ] == []


CASES = [
    *((name, fault) for name in VARIANTS for fault in EARLY),
    *((name, fault) for name in VARIANTS if name != "in_backward" for fault in LATE),
]


@pytest.mark.parametrize(("name", "fault"), CASES, ids=[f"{n}-{f.__name__}" for n, f in CASES])
def test_a_failed_step_never_ran(name: str, fault: Any) -> None:
    base, data = tiny(Faulty), batches(4)
    unbroken, core = core_of(base, **VARIANTS[name]), core_of(base, **VARIANTS[name])
    expected = [result.loss for result in run(unbroken, data)]
    found = []
    for pair in data:
        before = core.state()
        with failing(core, REASONS[fault]):
            fault(core, pair)
        assert_same_state(core, before)
        found += [result.loss for result in run(core, [pair])]
    assert found == expected
    assert_same(core.module, unbroken.module)
    assert_same(core.hosted.module, unbroken.hosted.module)


@pytest.mark.parametrize("fault", [non_finite_input, non_finite_gradient])
def test_a_skipped_step_leaves_no_trace_but_its_count(fault: Any) -> None:
    base, data = tiny(Faulty), batches(4)
    unbroken = core_of(base, **BASE, accumulation=2)
    core = core_of(base, **BASE, accumulation=2, on_nonfinite="skip")
    run(unbroken, data)
    for pair in data:
        before = core.state()
        fault(core, pair)
        net(core).switch.backward_action = None
        after = core.state()
        assert all(torch.equal(after.tensors[name], found) for name, found in before.tensors.items())
        run(core, [pair])
    assert_same(core.module, unbroken.module)
    assert core.skipped_count == 4
    assert core.step_count == 8
    assert core.update_count == 2


def test_a_gradient_whose_square_overflows_is_finite() -> None:
    core = core_of(tiny(Faulty), losses=[{"name": "cross_entropy", "weight": 1e25}], trainable=["fc"])
    (result,) = run(core, batches(1))
    assert result.is_update


@pytest.mark.parametrize("fault", LATE)
def test_an_update_that_stops_half_way_breaks_the_trainer_until_it_is_restored(fault: Any) -> None:
    base, data = tiny(Faulty), batches(4)
    unbroken = core_of(base, **VARIANTS["in_backward"])
    core = core_of(base, **VARIANTS["in_backward"])
    run(unbroken, data)
    run(core, data[:2])
    saved = core.state()
    with failing(core, ErrorReason.TRAINER_BROKEN):
        fault(core, data[2])
    for call in (
        core.state,
        lambda: run(core, data[:1]),
        lambda: core.evaluate(batch_of(data[0]), PassGuard()),
    ):
        with pytest.raises(ServiceError, match="restore it") as caught:
            call()
        assert caught.value.reason is ErrorReason.TRAINER_BROKEN
    core.load_state(saved)
    run(core, data[2:])
    assert_same(core.module, unbroken.module)


def test_a_full_disk_in_the_middle_of_the_forward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, data = tiny(Faulty), batches(4)
    spool = {"store": "spool", "budget_bytes": 0, "min_bytes": 0}
    unbroken = core_of(base, **BASE, accumulation=2)
    core = core_of(base, tmp_path, **BASE, accumulation=2, saved_tensors=spool)
    run(unbroken, data)
    for pair in data:
        before = core.state()
        with monkeypatch.context() as patch, failing(core, ErrorReason.STORAGE_FULL):
            for name in ("write", "pwrite", "writev", "pwritev"):
                patch.setattr(os, name, _no_room)
            run(core, [pair])
        assert_same_state(core, before)
        run(core, [pair])
    assert_same(core.module, unbroken.module)
    core.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def _no_room(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_files_that_are_gone_fail_the_backward_pass(tmp_path: Path) -> None:
    base, data = tiny(Faulty), batches(2)
    core = core_of(
        base, tmp_path, **BASE, saved_tensors={"store": "spool", "budget_bytes": 0, "min_bytes": 0}
    )
    before = core.state()

    def damage(_: Tensor) -> None:
        for path in tmp_path.rglob("*"):
            if path.is_file():
                os.truncate(path, 0)

    net(core).switch.backward_action = damage
    with failing(core, ErrorReason.SPOOL_FAILED):
        run(core, data[:1])
    assert_same_state(core, before)
    core.close()


def test_the_values_of_a_failed_step_are_freed() -> None:
    core = core_of(tiny(Faulty), **BASE)
    seen: list[weakref.ref[Tensor]] = []

    def fail(x: Tensor) -> Tensor:
        seen.append(weakref.ref(x))
        raise RuntimeError("no")

    net(core).switch.forward_action = fail
    with pytest.raises(ServiceError):
        run(core, batches(1))
    gc.collect()
    assert seen[0]() is None


def test_halves_out_of_order_are_refused() -> None:
    core, data = core_of(tiny(), accumulation=2), batches(3)
    core.forward_backward(batch_of(data[0]), PassGuard())
    with pytest.raises(ServiceError, match="1 of 2") as caught:
        core.optimizer_step()
    assert caught.value.reason is ErrorReason.STEP_OUT_OF_ORDER
    core.forward_backward(batch_of(data[1]), PassGuard())
    with pytest.raises(ServiceError, match="accumulated and not applied") as caught:
        core.step(batch_of(data[2]), PassGuard())
    assert caught.value.reason is ErrorReason.STEP_OUT_OF_ORDER
    core.optimizer_step()
    assert core.update_count == 1


@pytest.mark.parametrize("name", ["lbfgs", "in_backward"])
def test_halves_are_refused_where_the_optimizer_takes_whole_steps(name: str) -> None:
    core, data = core_of(tiny(), **VARIANTS[name]), batches(1)
    with pytest.raises(ServiceError, match="use `step`"):
        core.forward_backward(batch_of(data[0]), PassGuard())
    with pytest.raises(ServiceError, match="use `step`"):
        core.optimizer_step()


class Replacing(nn.Module):
    """Puts a new tensor in the place of its buffer at every call in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(5))
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.fc(x)
        if self.training:
            self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        return x - self.mean.detach()


def test_a_buffer_that_is_replaced_stays_in_its_memory() -> None:
    base, data = tiny(Replacing, (4,)), batches(3, shape=(4,))
    core = core_of(base)
    place = net(core.hosted).mean.data_ptr()
    run(core, data)
    assert net(core).mean.data_ptr() == place
    assert not net(core).mean.requires_grad
    assert torch.equal(net(core.hosted).mean, net(core).mean)
    assert not torch.equal(net(core).mean, torch.zeros(5))
    before = core.state()
    with pytest.raises(ServiceError):
        wrong_label(core, data[0])
    assert_same_state(core, before)


class Growing(TinyNet):
    """Its buffer gets one element more in a pass on more than four images."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        if len(x) > 4:
            self.seen = torch.cat([self.seen, torch.ones(1)])
        return super().forward(x)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_in_which_a_buffer_grows_never_ran(name: str) -> None:
    core, data = core_of(tiny(Growing), **VARIANTS[name]), batches(3)
    run(core, data[:1])
    before = core.state()
    with pytest.raises(ServiceError, match="'seen' by one of another shape") as caught:
        run(core, batches(1, size=5))
    assert caught.value.reason is ErrorReason.INPUT_REJECTED
    assert_same_state(core, before)
    run(core, data[1:])


def test_weights_that_were_half_updated_are_not_shown_as_good_ones() -> None:
    core, data = core_of(tiny(Faulty), **VARIANTS["in_backward"]), batches(1)
    core.check_usable()
    with failing(core, ErrorReason.TRAINER_BROKEN):
        cancelled_in_backward(core, data[0])
    with pytest.raises(ServiceError, match="restore it") as caught:
        core.check_usable()
    assert caught.value.reason is ErrorReason.TRAINER_BROKEN
    assert core.gradients() == {}


class WritingToItsValue(TinyNet):
    """Writes to a value that the backward pass needs: torch refuses that."""

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x).exp()
        y = self.fc(self.pool(x).flatten(1))
        x.zero_()
        return y


@pytest.mark.parametrize("store", ["none", "spool"])
def test_a_model_that_writes_to_a_saved_tensor_is_told_so_with_a_spool_or_without(
    tmp_path: Path, store: str
) -> None:
    saved = {"store": store, **({"budget_bytes": 0, "min_bytes": 0} if store == "spool" else {})}
    core = core_of(tiny(WritingToItsValue), tmp_path, **BASE, saved_tensors=saved)
    with pytest.raises(ServiceError, match="modified by an inplace operation") as caught:
        run(core, batches(1))
    assert caught.value.reason is ErrorReason.INPUT_REJECTED
    core.close()


def test_an_optimizer_that_fails_breaks_the_trainer_until_it_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, data = tiny(), batches(3)
    unbroken, core = core_of(base, **BASE), core_of(base, **BASE)
    run(unbroken, data)
    run(core, data[:1])
    saved = core.state()
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["torch.optim.adam"], "adam", fail_with(RuntimeError("no")))
        with pytest.raises(ServiceError, match="restore it") as caught:
            run(core, data[1:2])
    assert caught.value.reason is ErrorReason.TRAINER_BROKEN
    core.load_state(saved)
    run(core, data[1:])
    assert_same(core.module, unbroken.module)


def test_a_loss_that_nothing_trained_has_an_influence_on() -> None:
    core = core_of(tiny(Plain), trainable=["unused"])
    with pytest.raises(ServiceError, match="does not depend") as caught:
        run(core, batches(1))
    assert caught.value.reason is ErrorReason.TRAINER_INVALID
