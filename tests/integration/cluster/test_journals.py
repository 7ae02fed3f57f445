"""Journals of trainers at takeovers: cancelled checkpoints, calls that break a trainer or kill its server."""

import asyncio
import os
import signal
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import trocar
from tests.support import ROOT
from tests.support.models.trainable_nets import RootNet
from tests.support.oracles.tiny_training import (
    MODELS,
    assert_weights,
    make_trainer,
    samples,
    stepped_plainly,
)
from tests.support.servers import warm_python
from tests.support.servers.replicas import Replicas
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.durable_steps import REPLAY_S
from trocar_server.training.files.checkpoints import CheckpointStore
from trocar_server.training.files.owner_folders import OwnerFolders
from trocar_server.training.files.step_journal import StepJournal
from trocar_server.training.losses.batch import Batch
from trocar_server.training.step.core import TrainerCore
from trocar_server.training.trainer import Trainer
from trocar_server.training.trainer_calls import CallKind

WAIT_S = 60.0


def stepped(trainer: trocar.training.Trainer, *seeds: int) -> trocar.training.Trainer:
    for seed in seeds:
        trainer.step(*samples(4, seed))
    return trainer


def own(server: RunningServer, trainer: trocar.training.Trainer) -> Trainer:
    return next(one for one in server.app.trainers.all() if one.trainer_id == trainer.trainer_id)


def cancelled_while_writing(
    server: RunningServer, trainer: Trainer, batch: Any, store: type, method: str
) -> None:
    """Cancel a step while the disk is slow at what a store writes before the step runs."""
    write = getattr(store, method)
    writing, may_write, written = (threading.Event() for _ in range(3))

    def slow(*arguments: Any, **options: Any) -> Any:
        writing.set()
        assert may_write.wait(WAIT_S)
        try:
            return write(*arguments, **options)
        finally:
            written.set()

    async def call() -> None:
        number = trainer.numbering.next_number
        step = trainer.forward_backward(number, lambda _: batch, None, is_step=True)
        calling = asyncio.create_task(step)
        await asyncio.to_thread(writing.wait, WAIT_S)
        calling.cancel()
        await asyncio.wait([calling], timeout=0.2)  # it may wait for the disk, or not
        may_write.set()
        await asyncio.wait([calling])
        assert calling.cancelled()
        assert await asyncio.to_thread(written.wait, WAIT_S)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, method, slow)
        server.run(call)


def test_a_call_cancelled_during_its_checkpoint_loses_no_step_after_it(
    replicas: Replicas, clients: Any, tmp_path: Path
) -> None:
    first, second = replicas.start(), replicas.start()
    trainer, other = (stepped(make_trainer(clients(first)), 0, 1) for _ in range(2))
    for one in (trainer, other):  # long enough together, not alone
        journal = own(first, one).durable
        assert journal is not None
        journal.compute_s = 0.6 * REPLAY_S
    images, labels = map(torch.from_numpy, samples(4, 9))
    batch = Batch((images,), {}, {"": labels}, 4)
    cancelled_while_writing(first, own(first, trainer), batch, CheckpointStore, "save")
    stepped(other, 2)  # saves a checkpoint, so that the other's journal is not due any more
    stepped(trainer, 2, 3)
    replicas.lose(by=second)
    again = clients(second).trainer(trainer.trainer_id)
    assert again.info().next_number == 4
    assert_weights(again, stepped_plainly([samples(4, seed) for seed in range(4)]), tmp_path)


def test_a_call_cancelled_while_it_is_recorded_is_not_applied_by_another_server(
    replicas: Replicas, clients: Any, tmp_path: Path
) -> None:
    """Its number is free: the caller that takes it next gets the result of its own batch."""
    first, second = replicas.start(), replicas.start()
    trainer = stepped(make_trainer(clients(first)), 0, 1)
    images, labels = map(torch.from_numpy, samples(4, 9))
    batch = Batch((images,), {}, {"": labels}, 4)
    cancelled_while_writing(first, own(first, trainer), batch, StepJournal, "write")
    replicas.lose(by=second)
    again = clients(second).trainer(trainer.trainer_id)
    assert again.info().next_number == 2
    again.step(*samples(4, 2), number=2)
    assert_weights(again, stepped_plainly([samples(4, seed) for seed in range(3)]), tmp_path)


def broken_by_its_last_step(replicas: Replicas, clients: Any) -> tuple[trocar.training.Trainer, Any]:
    """Lose a replica right after a step that broke its trainer: its entry is still there."""
    first = replicas.start(models={"root": custom(RootNet)})
    trainer = clients(first).train("root", optimizer=trocar.training.sgd(lr=0.05, in_backward=True))
    batch = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32), np.arange(4)
    trainer.step(*batch)
    assert trainer.save().number == 1
    trainer.step(*batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepJournal, "discard", lambda *_: None)
        with pytest.raises(trocar.errors.TrainerBrokenError, match=r"gradient of 'stem\.weight'"):
            trainer.step(np.zeros_like(batch[0]), batch[1])
    return trainer, batch


def test_a_trainer_that_its_last_step_broke_comes_back_to_be_restored(
    replicas: Replicas, clients: Any, tmp_path: Path
) -> None:
    trainer, batch = broken_by_its_last_step(replicas, clients)
    second = replicas.start(models={"root": custom(RootNet)})
    replicas.lose(by=second)
    again = clients(second).trainer(trainer.trainer_id)
    assert again.info().state == "broken"
    again.restore(1)
    plain = rebuilt(RootNet)
    cross_entropy(plain(torch.from_numpy(batch[0])), torch.from_numpy(batch[1])).backward()
    torch.optim.SGD(plain.parameters(), lr=0.05).step()
    assert_weights(again, plain, tmp_path)


def test_a_step_that_breaks_its_trainer_in_passing_is_repeated_again(
    replicas: Replicas, clients: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full device does not make a trainer broken whose steps are all in its journal."""
    first, second = replicas.start(), replicas.start()
    trainer = stepped(make_trainer(clients(first)), 0, 1)
    updates = iter([True, False])

    def update(*_: Any) -> None:
        if not next(updates):
            raise torch.OutOfMemoryError("the device is full right now")

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", update)
        replicas.lose(by=second)
    assert not list(updates)
    again = clients(second).trainer(trainer.trainer_id)
    assert (again.info().state, again.info().next_number) == ("ready", 2)
    assert_weights(again, stepped_plainly([samples(4, seed) for seed in range(2)]), tmp_path)


def take_over_and_die(root: str, name: str, owner: str, trainer_id: str) -> None:
    """Run a replica that the third step of a trainer kills."""

    def step(core: TrainerCore, *given: Any) -> Any:
        if core.step_count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(core, *given)

    original, TrainerCore.step = TrainerCore.step, step  # type: ignore[method-assign, assignment]
    folder = Path(root).parent
    settings: dict[str, Any] = {"models": MODELS, "device": "cpu", "data_dir": folder / "data"}
    owners = OwnerFolders(Path(root), name)
    with running_server(owners=owners, own_dir=folder / name, **settings) as server:
        server.run(lambda: server.app.trainers.take_over(owner, trainer_id))


def killed_by(replicas: Replicas, trainer_id: str, count: int) -> None:
    """Let replicas take a trainer over that kills each of them."""
    names = ["replica-0", *(f"killed-{number}" for number in range(count))]
    program = f"from {__name__} import take_over_and_die as run; import sys; run(*sys.argv[1:])"
    for owner, name in pairwise(names):
        words = [sys.executable, "-c", program, replicas.root, name, owner, trainer_id]
        assert warm_python.run(words, cwd=ROOT).returncode == -signal.SIGKILL


def with_a_step_that_kills(server: RunningServer, client: trocar.Client) -> trocar.training.Trainer:
    """Make a trainer with two steps, and a third one that was recorded and not acknowledged."""
    trainer = stepped(make_trainer(client), 0, 1)
    durable = own(server, trainer).durable
    assert durable is not None
    images, labels = map(torch.from_numpy, samples(4, 2))
    server.run(lambda: durable.record(2, CallKind.STEP, Batch((images,), {}, {"": labels}, 4)))
    return trainer


def test_a_step_that_kills_each_server_is_given_up(
    replicas: Replicas, clients: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = replicas.start(), replicas.start()
    trainer = with_a_step_that_kills(first, clients(first))
    killed_by(replicas, trainer.trainer_id, 2)
    replicas.lose(by=last)
    third = replicas.start()
    replicas.lose(by=third)  # nor does the next one try it, while no call has come
    again = clients(third).trainer(trainer.trainer_id)
    assert again.info().next_number == 2
    (notice,) = again.info().notices
    assert "step 2" in notice
    stepped_again = again.step(*samples(4, 2), number=2)  # of its caller, who has got no answer
    assert (stepped_again.number, stepped_again.update_count) == (2, 3)
    assert again.info().notices == ()
    assert_weights(again, stepped_plainly([samples(4, seed) for seed in range(3)]), tmp_path)
    assert not list(replicas.root.glob("*/*/*.attempts"))


def test_a_step_is_repeated_again_after_one_server_was_killed_by_chance(
    replicas: Replicas, clients: Any, tmp_path: Path
) -> None:
    first, last = replicas.start(), replicas.start()
    trainer = with_a_step_that_kills(first, clients(first))
    killed_by(replicas, trainer.trainer_id, 1)
    replicas.lose(by=last)
    again = clients(last).trainer(trainer.trainer_id)
    assert (again.info().next_number, again.info().notices) == (3, ())
    assert_weights(again, stepped_plainly([samples(4, seed) for seed in range(3)]), tmp_path)
    assert not list(replicas.root.glob("*/*/*.attempts"))


def test_a_full_disk_keeps_no_trainer_from_coming_back(
    replicas: Replicas, clients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = replicas.start(), replicas.start()
    trainer = stepped(make_trainer(clients(first)), 0, 1)
    full = ServiceError(ErrorReason.STORAGE_FULL, "the disk is full")
    monkeypatch.setattr(StepJournal, "begin_attempt", Mock(side_effect=full))
    replicas.lose(by=second)
    assert clients(second).trainer(trainer.trainer_id).info().next_number == 2
