"""Trainers when something goes wrong in the middle: cancelled calls, deadlines, closing."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import trocar
from tests.support.oracles.tiny_training import (
    MODELS,
    assert_weights,
    batches,
    make_trainer,
    samples,
    stepped_plainly,
)

if TYPE_CHECKING:
    from tests.support.servers.running_server import RunningServer
    from tests.support.servers.serving import Serve


@pytest.fixture
def running(serve: Serve, tmp_path: Path) -> RunningServer:
    return serve(models=MODELS, data_dir=tmp_path / "data")


async def test_cancelled_steps_are_applied_once_or_not_at_all(running: RunningServer, tmp_path: Path) -> None:
    """Whatever became of a cancelled call: sent again with its number, it is there once."""
    given, chance, cancelled = batches(100), random.Random(1), 0
    async with trocar.aio.connect(running.address) as client:
        trainer = await client.train("tiny", optimizer=trocar.sgd(lr=0.05, momentum=0.9), seed=7)
        for number, batch in enumerate(given):
            call = asyncio.create_task(trainer.step(*batch, number=number))
            await asyncio.wait([call], timeout=chance.random() * 0.006)
            cancelled += call.cancel()
            await asyncio.wait([call])
            result = await trainer.step(*batch, number=number)
            assert (result.number, result.update_count) == (number, number + 1)
        trainer_id = trainer.trainer_id
    assert cancelled
    with trocar.connect(running.address) as again:
        assert_weights(again.trainer(trainer_id), stepped_plainly(given), tmp_path)


def test_steps_with_hardly_any_time_are_applied_once_or_not_at_all(
    client: trocar.Client, tmp_path: Path
) -> None:
    given, chance, late = batches(60), random.Random(2), 0
    trainer = make_trainer(client)
    for number, batch in enumerate(given):
        try:
            trainer.step(*batch, number=number, timeout_s=0.0002 + chance.random() * 0.003)
        except trocar.DeadlineExceededError:
            late += 1
        assert trainer.step(*batch, number=number).update_count == number + 1
    assert late
    assert_weights(trainer, stepped_plainly(given), tmp_path)


async def test_a_call_that_gives_up_waiting_for_its_turn_leaves_no_trace(
    running: RunningServer, tmp_path: Path
) -> None:
    given = batches(3)
    async with trocar.aio.connect(running.address) as client:
        trainer = await client.train("tiny", optimizer=trocar.sgd(lr=0.05, momentum=0.9), seed=7)
        waiting = asyncio.create_task(trainer.step(*given[1], number=1))
        done, _ = await asyncio.wait([waiting], timeout=0.1)
        assert not done
        waiting.cancel()
        await asyncio.wait([waiting])
        for number, batch in enumerate(given):
            await trainer.step(*batch, number=number)
        trainer_id = trainer.trainer_id
    with trocar.connect(running.address) as again:
        assert_weights(again.trainer(trainer_id), stepped_plainly(given), tmp_path)


def test_watchers_of_a_trainer_that_is_closed_are_told(client: trocar.Client, tmp_path: Path) -> None:
    trainer = make_trainer(client)
    first = trainer.start_fit(samples(16), epochs=100_000, batch_size=8)

    def watch() -> None:
        for event in trainer.watch(first):
            if event.kind == "step" and event["step"] == 3:
                trainer.close()

    with pytest.raises(trocar.UnknownTrainerError):
        watch()
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_fit_that_is_started_again_by_a_retry_is_the_same_fit(
    client: trocar.Client, running: RunningServer
) -> None:
    from trocar_server.training.spec.fit_spec import FitSpec

    trainer = make_trainer(client)
    dataset = client.upload_dataset(samples(8)).dataset_id
    fits = running.app.fits
    (own,) = running.app.trainers.all()

    async def start() -> int:
        return await fits.start(own.principal, own.trainer_id, FitSpec(dataset_id=dataset), "request-1")

    first = running.run(start)
    assert [event.kind for event in trainer.watch(first)][-1] == "finished"
    assert running.run(start) == first
    assert len(list(trainer.watch(first))) == trainer_events(trainer)


def trainer_events(trainer: trocar.Trainer) -> int:
    return 1 + max(event.number for event in trainer.watch())


@pytest.mark.parametrize("is_cancelled_in_work", [True, False])
async def test_a_step_that_was_cancelled_too_late_is_not_applied_again(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch, is_cancelled_in_work: bool
) -> None:
    """The call is cancelled while the optimizer is at work, when there is no way back."""
    with trocar.connect(running.address) as client:
        trainer_id = make_trainer(client).trainer_id
        (own,) = running.app.trainers.all()
        step, calls = own.core.step, list[Any]()

        def stepping(*arguments: Any) -> Any:
            result = step(*arguments)
            if is_cancelled_in_work and not calls:
                calls.append(running._loop.call_soon_threadsafe(tasks[0].cancel))
                time.sleep(0.05)  # until the loop has done so
            return result

        monkeypatch.setattr(own.core, "step", stepping)
        tasks: list[asyncio.Task[Any]] = []

        async def call() -> Any:
            from trocar_server.training.losses.batch import Batch

            images, labels = map(torch.from_numpy, samples(4))
            batch = Batch((images,), {}, {"": labels}, 4)
            tasks[:] = [asyncio.create_task(own.forward_backward(0, lambda _: batch, None, is_step=True))]
            await asyncio.wait(tasks)
            return tasks[0].cancelled()

        assert running.run(call) is is_cancelled_in_work
        assert running.run(call) is False
        info = client.trainer(trainer_id).info()
        assert (info.update_count, info.next_number) == (1, 1)
