"""Ranks that connect over the network, against local ones and against a script of DistributedDataParallel."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.trainable_nets import SteadyNet
from tests.support.oracles.ddp_training import Job, states_of
from tests.unit.training.fit.ranks.placing import HOST, LocalPlacer
from tests.unit.training.fits import Checkpoints, dataset, run_fit, shown_core, steps_of
from tests.unit.training.trainers import tiny, value_edit
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard
from trocar_server.surgery.guard import PassAborted
from trocar_server.training.fit.fit import Fit
from trocar_server.training.fit.ranks.data_parallel import DataParallel
from trocar_server.training.fit.ranks.placed_ranks import PlacedLauncher
from trocar_server.training.spec.fit_spec import FitSpec
from trocar_server.training.step.core import TrainerCore

DATA = dataset(20)
CLAMP: dict[str, Any] = {"name": "clamp", "options": {"low": -0.01, "high": 0.01}}
FIELDS: dict[str, Any] = {
    "optimizer": {"name": "sgd", "options": {"lr": 0.1, "momentum": 0.9}},
    "trainable": ["stem", "fc"],
    "gradient_edits": [{"selector": "stem", "selectors": ["fc"], **CLAMP}],
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Placed:
    """Makes fits on placed ranks, and ends these."""

    def __init__(self, folder: Path) -> None:
        self.placer = LocalPlacer()
        self._folder, self._made = folder, list[DataParallel]()

    def __call__(self, core: TrainerCore, base: Any, workers: int = 2) -> tuple[Fit, DataParallel]:
        parallel = DataParallel(core, base, {}, workers, PlacedLauncher(self.placer, HOST))
        self._made.append(parallel)
        spec = FitSpec(dataset_id="d", workers=workers, batch_size=4 * workers, epochs=1)
        return Fit(core, DATA, None, spec, self._folder, Checkpoints(core), None, parallel), parallel

    def close(self) -> None:
        for one in self._made:
            one.close()


@pytest.fixture
def placed(tmp_path: Path) -> Iterator[Placed]:
    made = Placed(tmp_path)
    yield made
    made.close()
    assert made.placer.launches == {}


def test_each_step_is_that_of_a_ddp_script_though_one_rank_is_killed(placed: Placed, tmp_path: Path) -> None:
    base = tiny(SteadyNet)
    core = shown_core(base, **FIELDS)
    model = SteadyNet()
    model.load_state_dict(base.module.state_dict())
    job = Job(model, DATA.images, DATA.targets, 1, 8, clamp=(-0.01, 0.01))
    expected = states_of(job, 2, tmp_path)
    fit, parallel = placed(core, base)
    assert not fit.needs_workers  # before the first checkpoint
    while not fit.needs_workers:
        fit.advance(PassGuard())
    fit.prepare(PassGuard())
    assert parallel.is_ready
    for step, state in enumerate(expected, 1):
        if step == 2:
            (lost,) = placed.placer.process_ids
            os.kill(lost, signal.SIGKILL)
        steps_of(fit, step)
        found = core.module.state_dict()
        assert [name for name in state if not torch.equal(state[name], found[name])] == []
    assert len(placed.placer.secrets) == len(set(placed.placer.secrets)) == 2
    run_fit(fit)


def test_frozen_weights_are_those_of_rank_0(placed: Placed) -> None:
    base = tiny(SteadyNet)
    fields = FIELDS | {"trainable": ["fc"], "gradient_edits": []}
    alone, core = shown_core(base, **fields), shown_core(base, **fields)
    fit, _ = placed(core, base, 2)
    steps_of(fit, 1)
    one = alone.step(DATA.batch(fit._batches(0)[0]), PassGuard())
    found = core.module.state_dict()
    torch.testing.assert_close(found["fc.weight"], alone.module.state_dict()["fc.weight"])
    assert one.is_update


def test_ranks_make_the_edits_of_the_trainer(placed: Placed) -> None:
    base = tiny(SteadyNet)
    fields = FIELDS | {"trainable": ["fc"], "gradient_edits": []}
    edits = [value_edit("stem", "steer", range(8))]
    plain, alone, core = (shown_core(base, **fields, edits=each) for each in ((), edits, edits))
    fit, _ = placed(core, base, 2)
    steps_of(fit, 1)
    for one in (plain, alone):
        one.step(DATA.batch(fit._batches(0)[0]), PassGuard())
    found = core.module.state_dict()["fc.weight"]
    torch.testing.assert_close(found, alone.module.state_dict()["fc.weight"])
    assert not torch.allclose(found, plain.module.state_dict()["fc.weight"])


def test_no_room_and_too_large_a_cluster_are_refused_in_words(placed: Placed) -> None:
    base = tiny(SteadyNet)
    core = shown_core(base, **FIELDS)
    placed.placer.capacity = 1
    with pytest.raises(
        ServiceError, match=r"the nodes of the cluster have room for 1, .* not for 2"
    ) as caught:
        placed(core, base)
    assert caught.value.reason is ErrorReason.FIT_INVALID
    placed.placer.capacity, placed.placer.refusal = 2, "the cluster had no room"
    fit, _ = placed(core, base)
    with pytest.raises(ServiceError, match="workers: the cluster had no room") as caught:
        steps_of(fit, 1)
    assert caught.value.reason is ErrorReason.SERVER_BUSY


def test_a_wait_for_room_can_be_given_up(placed: Placed) -> None:
    base = tiny(SteadyNet)
    placed.placer.place = lambda own_id, *_: placed.placer.launches.setdefault(own_id, [])  # type: ignore[method-assign,assignment]
    _, parallel = placed(shown_core(base, **FIELDS), base)
    guard = PassGuard()
    guard.cancel()
    with pytest.raises(PassAborted):
        parallel.prepare(guard)


def test_another_model_on_a_node_is_refused(placed: Placed) -> None:
    base = tiny(SteadyNet)
    placed.placer = LocalPlacer("wide")
    fit, _ = placed(shown_core(base, **FIELDS), base)
    with pytest.raises(ServiceError, match="another node builds another model"):
        steps_of(fit, 1)
