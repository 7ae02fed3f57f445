"""Fits on several ranks, against a plain script of DistributedDataParallel."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.support.models.trainable_nets import SteadyNet
from tests.support.oracles.ddp_training import Job, states_of
from tests.support.servers import warm_python
from tests.unit.training.fits import Checkpoints, dataset, run_fit, shown_core, steps_of
from tests.unit.training.trainers import TinyNet, assert_same, tiny
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel
from trocar_server.surgery import PassGuard
from trocar_server.surgery.guard import PassAborted
from trocar_server.training.fit.fit import Fit
from trocar_server.training.fit.fit_state import FitState
from trocar_server.training.fit.ranks import local_ranks
from trocar_server.training.fit.ranks.data_parallel import DataParallel, shard_of
from trocar_server.training.fit.ranks.local_ranks import LocalLauncher, LocalRanks
from trocar_server.training.losses.batch import Batch
from trocar_server.training.spec.fit_spec import FitSpec
from trocar_server.training.step.core import TrainerCore

SGD: dict[str, Any] = {"optimizer": {"name": "sgd", "options": {"lr": 0.1, "momentum": 0.9}}}
DATA = dataset(22)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A rank of the script has as many threads as one of the fit: their number changes the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of any size run these tests."""
    monkeypatch.setattr(local_ranks, "cpu_count", lambda: 64)


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are there in 0.1 s instead of 4."""
    monkeypatch.setattr(LocalRanks, "starts", warm_python.Popen)


class Fits:
    """Makes fits, and ends their workers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[DataParallel] = []

    def __call__(
        self,
        core: TrainerCore,
        base: HostedModel,
        workers: int = 2,
        state: FitState | None = None,
        **fields: Any,
    ) -> tuple[Fit, DataParallel]:
        spec = {"dataset_id": "d", "workers": workers, "batch_size": 8, "epochs": 2, **fields}
        parallel = DataParallel(core, base, {}, workers, LocalLauncher(self._folder))
        self._made.append(parallel)
        kept = fields.pop("checkpoint", None) or Checkpoints(core)
        spec.pop("checkpoint", None)
        return Fit(
            core, DATA, None, FitSpec.model_validate(spec), self._folder, kept, state, parallel
        ), parallel

    def close(self) -> None:
        for one in self._made:
            one.close()


@pytest.fixture
def fits(tmp_path: Path) -> Iterator[Fits]:
    made = Fits(tmp_path)
    yield made
    made.close()


CLAMP: dict[str, Any] = {"name": "clamp", "options": {"low": -0.01, "high": 0.01}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "clip_norm": ({"clip_norm": 0.05}, {"clip_norm": 0.05}),
    "accumulation": ({"accumulation": 2}, {"accumulation": 2}),
    "clamp": (
        {"gradient_edits": [{"selector": "stem", "selectors": ["fc"], **CLAMP}]},
        {"clamp": (-0.01, 0.01)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_step_is_that_of_a_ddp_script(fits: Fits, tmp_path: Path, case: str) -> None:
    trainer, script = CASES[case]
    base = tiny(SteadyNet)
    core = shown_core(base, **SGD, **trainer)
    model = SteadyNet()
    model.load_state_dict(base.module.state_dict())
    expected = states_of(Job(model, DATA.images, DATA.targets, 2, 8, **script), 2, tmp_path)
    fit, _ = fits(core, base)
    for step, state in enumerate(expected, 1):
        steps_of(fit, step)
        found = core.module.state_dict()
        if core.spec.accumulation > 1:  # the script averages the sums, the fit sums the averages
            torch.testing.assert_close(dict(found), state, rtol=1e-5, atol=1e-6)
        else:
            assert [name for name in state if not torch.equal(state[name], found[name])] == []
    assert len(expected) == fit.step_total == 6
    run_fit(fit)


def test_three_ranks_take_the_steps_of_three_ddp_processes(
    fits: Fits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalRanks, "starts", staticmethod(subprocess.Popen))  # as a server starts them
    base = tiny(SteadyNet)
    core = shown_core(base, **SGD)
    model = SteadyNet()
    model.load_state_dict(base.module.state_dict())
    job = Job(model, DATA.images, DATA.targets, 1, 6)
    expected = states_of(job, 3, tmp_path)
    fit, _ = fits(core, base, 3, batch_size=6, epochs=1)
    for step, state in enumerate(expected, 1):
        steps_of(fit, step)
        torch.testing.assert_close(dict(core.module.state_dict()), state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_an_epoch_is_the_mean_over_its_samples(fits: Fits, workers: int, reduction: str) -> None:
    losses = [{"name": "cross_entropy", "options": {"reduction": reduction}}]
    still: dict[str, Any] = {
        "trainable": ["fc"],
        "losses": losses,
        "optimizer": {"name": "sgd", "options": {"lr": 0.0}},
    }
    core = shown_core(tiny(SteadyNet), **still)
    fit, _ = fits(core, tiny(SteadyNet), workers, epochs=1)
    (epoch,) = (event for event in run_fit(fit) if event.kind == "epoch")
    with torch.no_grad():
        expected = cross_entropy(core.hosted.module(DATA.images), DATA.targets).item()
    assert epoch.loss == pytest.approx(expected, rel=1e-5)


def test_the_state_at_any_step_is_enough_to_go_on(fits: Fits) -> None:
    base = tiny(TinyNet)  # with dropout on each rank
    whole = shown_core(base, **SGD)
    fit, _ = fits(whole, base)
    run_fit(fit)

    first = shown_core(base, **SGD)
    begun, _ = fits(first, base)
    steps_of(begun, 4)
    second = shown_core(base, **SGD)
    second.load_state(first.state())
    rest, _ = fits(second, base, state=FitState.from_json(begun.state().to_json()))
    run_fit(rest)
    assert_same(second.module, whole.module)


def test_a_killed_worker_costs_a_step_and_changes_nothing(fits: Fits) -> None:
    base = tiny(TinyNet)
    undisturbed, disturbed = shown_core(base, **SGD), shown_core(base, **SGD)
    fit, _ = fits(undisturbed, base)
    events = run_fit(fit)
    other, parallel = fits(disturbed, base)
    steps_of(other, 2)
    (lost,) = parallel.process_ids
    os.kill(lost, signal.SIGKILL)
    steps_of(other, 4)
    assert parallel.process_ids != (lost,)
    run_fit(other)
    assert_same(disturbed.module, undisturbed.module)
    assert other.state().step == fit.state().step
    assert [event.kind for event in events].count("step") == 6


def test_a_worker_that_ends_again_fails_the_step_and_changes_nothing(
    fits: Fits, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny(SteadyNet)
    core = shown_core(base, **SGD)
    before = {name: value.clone() for name, value in core.module.state_dict().items()}
    fit, parallel = fits(core, base)
    begin = type(parallel)._run

    def lose(self: DataParallel, *arguments: Any) -> Any:
        for process_id in self.process_ids:
            os.kill(process_id, signal.SIGKILL)
        return begin(self, *arguments)

    monkeypatch.setattr(DataParallel, "_run", lose)
    with pytest.raises(ServiceError, match="ended twice") as caught:
        steps_of(fit, 1)
    assert caught.value.reason == ErrorReason.OUT_OF_MEMORY
    assert fit.state().step == 0
    assert all(torch.equal(before[name], value) for name, value in core.module.state_dict().items())
    monkeypatch.setattr(DataParallel, "_run", begin)
    steps_of(fit, 1)


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(fits: Fits) -> None:
    base = tiny(SteadyNet)
    core = shown_core(base, **SGD, on_nonfinite="skip")
    before = {name: value.clone() for name, value in core.module.state_dict().items()}
    _, parallel = fits(core, base)
    images, labels = DATA.images[:4].clone(), DATA.targets[:4]
    images[1] = float("nan")  # of rank 1
    result = parallel.step(Batch((images,), {}, {"": labels}, 4), PassGuard())
    assert result is not None
    assert result.is_skipped
    assert all(torch.equal(before[name], value) for name, value in core.module.state_dict().items())
    workers = parallel.process_ids
    result = parallel.step(Batch((DATA.images[:4],), {}, {"": labels}, 4), PassGuard())
    assert result is not None
    assert result.is_update
    assert parallel.process_ids == workers


def test_an_aborted_step_changes_nothing_and_the_next_one_works(fits: Fits) -> None:
    base = tiny(SteadyNet)
    core = shown_core(base, **SGD)
    fit, _ = fits(core, base)
    steps_of(fit, 1)
    before = {name: value.clone() for name, value in core.module.state_dict().items()}
    guard = PassGuard()
    guard.cancel()
    with pytest.raises((ServiceError, PassAborted)):
        fit.advance(guard)
    assert all(torch.equal(before[name], value) for name, value in core.module.state_dict().items())
    steps_of(fit, 2)


def test_shards_are_those_of_a_distributed_sampler() -> None:
    images = torch.arange(6.0).reshape(6, 1)
    batch = Batch((images, list("abcdef")), {"mask": images}, {"": torch.arange(6)}, 6)
    shard = shard_of(batch, 1, 2)
    assert shard.targets[""].tolist() == [1, 3, 5]
    assert (shard.args[1], shard.size) == (["b", "d", "f"], 3)
    with pytest.raises(ServiceError, match="leave out `workers`"):
        shard_of(Batch((torch.tensor(1.0),), size=6), 0, 2)


@pytest.mark.parametrize(
    ("trainer", "fields", "message"),
    [
        (SGD, {"batch_size": 7}, "a multiple, for example 8"),
        (SGD, {"workers": 32, "batch_size": 32}, "more than the 22 samples"),
        (SGD, {"workers": 65}, "less than or equal to 64"),
        ({"optimizer": {"name": "lbfgs"}}, {}, "lbfgs"),
        ({"optimizer": {"name": "sgd", "in_backward": True, "options": {"lr": 0.1}}}, {}, "in the backward"),
    ],
)
def test_what_workers_cannot_do_is_refused(
    fits: Fits, trainer: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    base = tiny(SteadyNet)
    with pytest.raises((ServiceError, ValueError), match=message):
        fits(shown_core(base, **trainer), base, **{"workers": 2, **fields})


def test_more_workers_than_processors_are_refused(fits: Fits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "cpu_count", lambda: 1)
    base = tiny(SteadyNet)
    with pytest.raises(ServiceError, match="2 is more than the 1 CPUs"):
        fits(shown_core(base, **SGD), base)
