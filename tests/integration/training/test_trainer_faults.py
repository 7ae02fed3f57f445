"""Trainers when something goes wrong in the middle: cancelled calls, deadlines, closing."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock, Mock

import pytest
import torch
from safetensors.torch import load_file

import trocar
from tests.support.oracles.tiny_training import (
    MODELS,
    assert_weights,
    batches,
    fitted_plainly,
    make_trainer,
    samples,
    stepped_plainly,
)
from tests.support.servers.running_server import RunningServer, running_server
from trocar._request.training.adapter_files import ADAPTER_WEIGHTS
from trocar_api.reasons import ErrorReason
from trocar_server.config import ServerConfig
from trocar_server.errors import ServiceError
from trocar_server.training.files.checkpoints import CheckpointStore
from trocar_server.training.files.owner_folders import OwnerFolders
from trocar_server.training.files.trainer_storage import StorageOnDemand
from trocar_server.training.step.core import TrainerCore
from trocar_server.training.trainer import Trainer

FULL = (ErrorReason.STORAGE_FULL, "the disk is full")

if TYPE_CHECKING:
    from tests.support.servers.serving import Serve


@pytest.fixture
def running(serve: Serve, tmp_path: Path) -> RunningServer:
    return serve(models=MODELS, data_dir=tmp_path / "data")


async def test_cancelled_steps_are_applied_once_or_not_at_all(running: RunningServer, tmp_path: Path) -> None:
    """Whatever became of a cancelled call: sent again with its number, it is there once."""
    given, chance, cancelled = batches(100), random.Random(1), 0
    async with trocar.aio.connect(running.address) as client:
        trainer = await client.train("tiny", optimizer=trocar.training.sgd(lr=0.05, momentum=0.9), seed=7)
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
        except trocar.errors.DeadlineExceededError:
            late += 1
        assert trainer.step(*batch, number=number).update_count == number + 1
    assert late
    assert_weights(trainer, stepped_plainly(given), tmp_path)


async def test_a_call_that_gives_up_waiting_for_its_turn_leaves_no_trace(
    running: RunningServer, tmp_path: Path
) -> None:
    given = batches(3)
    async with trocar.aio.connect(running.address) as client:
        trainer = await client.train("tiny", optimizer=trocar.training.sgd(lr=0.05, momentum=0.9), seed=7)
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


async def test_the_number_behind_a_cancelled_step_that_still_runs_counts_it(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = batches(2)
    async with trocar.aio.connect(running.address) as client:
        trainer = await client.train("tiny", optimizer=trocar.training.sgd(lr=0.05, momentum=0.9), seed=7)
        (own,) = running.app.trainers.all()
        step, at_rest = own.core.step, own.numbering.at_rest
        began, asked, goes_on = (threading.Event() for _ in range(3))

        def stepping(*arguments: Any) -> Any:
            result = step(*arguments)
            began.set()
            assert goes_on.wait(30)
            return result

        def resting() -> Any:
            asked.set()
            return at_rest()

        monkeypatch.setattr(own.core, "step", stepping)
        monkeypatch.setattr(own.numbering, "at_rest", resting)
        monkeypatch.setattr(own.core, "gradients", None)  # no copy of them is made to wait
        first = asyncio.create_task(trainer.step(*given[0]))
        assert await asyncio.to_thread(began.wait, 30)
        first.cancel()
        await asyncio.wait([first])
        asked.clear()
        second = asyncio.create_task(trainer.step(*given[1]))
        assert await asyncio.to_thread(asked.wait, 30)
        assert (await trainer.info()).next_number == 0  # which does not wait
        goes_on.set()
        assert (await second).number == 1
    with trocar.connect(running.address) as again:
        assert_weights(again.trainer(trainer.trainer_id), stepped_plainly(given), tmp_path)


def test_watchers_of_a_trainer_that_is_closed_are_told(client: trocar.Client, tmp_path: Path) -> None:
    trainer = make_trainer(client)
    first = trainer.start_fit(samples(16), epochs=100_000, batch_size=8)

    def watch() -> None:
        for event in trainer.watch(first):
            if event.kind == "step" and event["step"] == 3:
                trainer.close()

    with pytest.raises(trocar.errors.UnknownTrainerError):
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


def test_a_fit_that_is_started_while_the_last_one_ends_has_events_of_its_own(
    client: trocar.Client, running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trocar_server.training.fit.fit_run import FitRun
    from trocar_server.training.spec.fit_spec import FitSpec

    trainer = make_trainer(client)
    spec = FitSpec(dataset_id=client.upload_dataset(samples(8)).dataset_id, epochs=1, batch_size=8)
    (own,) = running.app.trainers.all()
    close = FitRun.close

    async def start() -> int:
        return await running.app.fits.start(own.principal, own.trainer_id, spec)

    async def start_both() -> tuple[int, int]:
        closing, may_close = asyncio.Event(), asyncio.Event()

        async def close_later(run: FitRun) -> None:
            closing.set()
            await may_close.wait()
            await close(run)

        monkeypatch.setattr(FitRun, "close", close_later)
        first = await start()
        await closing.wait()
        try:
            with suppress(ServiceError):
                return first, await start()
        finally:
            may_close.set()
        async for _ in running.app.fits.watch(own.principal, own.trainer_id, first):
            pass  # when its end is seen, the trainer is free
        return first, await start()

    first, second = running.run(start_both)
    monkeypatch.setattr(FitRun, "close", close)
    for number in (first, second):
        events = list(trainer.watch(number))
        assert (events[0].number, events[0].kind) == (number, "started")
        assert [event.kind for event in events].count("step") == 1
        assert events[-1].kind == "finished"


def test_a_stop_saves_a_trainer_that_was_restored_to_an_earlier_checkpoint(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"models": MODELS, "data_dir": tmp_path / "data", "device": "cpu"}
    given = batches(2)
    with running_server(**settings) as server, trocar.connect(server.address) as client:
        trainer = make_trainer(client)
        trainer.step(*given[0])
        first = trainer.save()
        trainer.step(*given[1])
        trainer.save()
        assert trainer.restore(first.number).update_count == 1
    with running_server(**settings) as server, trocar.connect(server.address) as client:
        found = client.trainer(trainer.trainer_id)
        info = found.info()
        assert (info.update_count, info.next_number) == (1, 1)
        assert_weights(found, stepped_plainly(given[:1]), tmp_path)
        numbers = [entry.number for entry in found.checkpoints()]
        found.restore()
    with running_server(**settings) as server, trocar.connect(server.address) as client:
        found = client.trainer(trainer.trainer_id)
        assert [entry.number for entry in found.checkpoints()] == numbers  # nothing had changed


@pytest.mark.parametrize("change", ["restore", "load_adapter"])
def test_a_change_that_could_not_be_saved_is_saved_before_the_next_step_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    settings: dict[str, Any] = {"models": MODELS, "data_dir": tmp_path / "data", "device": "cpu"}
    owners, given = OwnerFolders(tmp_path / "owners", "a"), batches(4)
    monkeypatch.setattr(Trainer, "save_changes", AsyncMock())  # as if the server was killed
    with running_server(owners=owners, **settings) as server, trocar.connect(server.address) as client:
        trainer = make_trainer(client, lora=trocar.training.lora({"fc": 2}, name="a"))
        trainer.step(*given[0])
        first = trainer.save()
        adapter = trainer.export_adapter(tmp_path / "adapter")
        trainer.step(*given[1])
        trainer.save()
        trainer.step(*given[2])
        changes: dict[str, Callable[[], object]] = {
            "restore": lambda: trainer.restore(first.number),
            "load_adapter": lambda: trainer.load_adapter(adapter),
        }
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointStore, "save", Mock(side_effect=ServiceError(*FULL)))
            with pytest.raises(trocar.errors.StorageFullError):
                changes[change]()
        trainer = client.trainer(trainer.trainer_id)
        trainer.step(*given[3])
        before = load_file(trainer.export(tmp_path / "before.safetensors"))
    owners = OwnerFolders(tmp_path / "owners", "b")
    with running_server(owners=owners, **settings) as server, trocar.connect(server.address) as client:
        server.run(lambda: server.app.trainers.take_over("a", trainer.trainer_id))
        trainer = client.trainer(trainer.trainer_id)
        after = load_file(trainer.export(tmp_path / "after.safetensors"))
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []


def test_a_loaded_adapter_that_could_not_be_saved_is_saved_by_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"models": MODELS, "data_dir": tmp_path / "data", "device": "cpu"}
    with running_server(**settings) as server, trocar.connect(server.address) as client:
        trainer = make_trainer(client, lora=trocar.training.lora({"fc": 2}, name="a"))
        trainer.step(*batches(1)[0])
        adapter = trainer.export_adapter(tmp_path / "adapter")
        trainer.step(*batches(1)[0])
        trainer.save()
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointStore, "save", Mock(side_effect=ServiceError(*FULL)))
            with pytest.raises(trocar.errors.StorageFullError):
                trainer.load_adapter(adapter)
        before = load_file(trainer.export(tmp_path / "before.safetensors"))
    with running_server(**settings) as server, trocar.connect(server.address) as client:
        after = load_file(client.trainer(trainer.trainer_id).export(tmp_path / "after.safetensors"))
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []


EPOCHS = 60


def stopped_in_a_fit(folder: Path) -> str:
    """Stop a server in the middle of a fit, and return its trainer's id."""
    with running_server(models=MODELS, data_dir=folder, device="cpu") as server:
        with trocar.connect(server.address) as client:
            trainer = make_trainer(client)
            first = trainer.start_fit(samples(16), epochs=EPOCHS, batch_size=4)
            assert first == 0
            next(event for event in trainer.watch(first) if event.kind == "step" and event["step"] == 5)
        (own,) = server.app.trainers.all()
    assert not own.stored_facts["fit"].get("is_over")
    return trainer.trainer_id


def assert_fit_goes_on(server: RunningServer, client: trocar.Client, trainer_id: str, folder: Path) -> None:
    """Compare the fit of `stopped_in_a_fit` with plain torch."""
    trainer = client.trainer(trainer_id)

    async def watch() -> list[tuple[int, str]]:
        (own,) = server.app.trainers.all()
        async with asyncio.timeout(30):
            events = server.app.fits.watch(own.principal, trainer_id, 0)
            return [(event.number, event.kind) async for event in events]

    events = server.run(watch)
    assert (events[0], events[-1][1]) == ((0, "started"), "finished")
    assert [number for number, _ in events] == list(range(len(events)))
    assert [kind for _, kind in events].count("step") == 4 * EPOCHS
    assert_weights(trainer, fitted_plainly(samples(16), EPOCHS, 4)[0], folder)


def test_a_fit_goes_on_when_the_model_of_its_trainer_is_configured_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    trainer_id = stopped_in_a_fit(data)
    with (
        running_server(models={}, data_dir=data, device="cpu") as server,
        trocar.connect(server.address) as client,
    ):
        with pytest.raises(trocar.errors.UnknownModelError):
            client.trainer(trainer_id)
        settings = server.app.lifecycle.config.model_dump(exclude_unset=True)
        server.app.lifecycle.reread = lambda: ServerConfig(**{**settings, "models": MODELS})
        client.reload_config()
        assert_fit_goes_on(server, client, trainer_id, tmp_path)


def test_a_fit_goes_on_with_its_events_when_the_disk_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    trainer_id = stopped_in_a_fit(data)

    def fail(_: object) -> None:
        raise ServiceError(ErrorReason.STORAGE_UNAVAILABLE, "the disk fails")

    with monkeypatch.context() as patch:
        patch.setattr(StorageOnDemand, "existing", fail)
        with (
            running_server(models=MODELS, data_dir=data, device="cpu") as server,
            trocar.connect(server.address) as client,
        ):
            patch.undo()
            assert_fit_goes_on(server, client, trainer_id, tmp_path)


def trainer_events(trainer: trocar.training.Trainer) -> int:
    return 1 + max(event.number for event in trainer.watch())


def test_a_fit_whose_events_cannot_be_read_does_not_keep_a_server_from_its_start(tmp_path: Path) -> None:
    data = tmp_path / "data"
    trainer_id = stopped_in_a_fit(data)
    (log,) = data.rglob(f"{trainer_id}.jsonl")
    log.rename(tmp_path / "log")
    log.mkdir()  # as a disk error, it can be opened by nobody
    settings: dict[str, Any] = {"models": MODELS, "data_dir": data, "device": "cpu"}
    with running_server(**settings) as server, trocar.connect(server.address) as client:
        trainer = client.trainer(trainer_id)
        assert trainer.info().state == "ready"
        with pytest.raises(trocar.errors.StorageUnavailableError):
            list(trainer.watch())
    log.rmdir()
    (tmp_path / "log").rename(log)
    with running_server(**settings) as server, trocar.connect(server.address) as client:
        assert_fit_goes_on(server, client, trainer_id, tmp_path)


def test_weights_that_were_half_updated_are_neither_exported_nor_published(
    client: trocar.Client, running: RunningServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer, given = (
        make_trainer(client, optimizer=trocar.training.sgd(lr=0.05, in_backward=True)),
        batches(2),
    )
    trainer.step(*given[0])
    first = trainer.save()
    (own,) = running.app.trainers.all()
    with monkeypatch.context() as patch:
        patch.setattr(own.core._updater.optimizer, "step", Mock(side_effect=[None, RuntimeError("no")]))
        with pytest.raises(trocar.errors.TrainerBrokenError):
            trainer.step(*given[1])
    refused: list[Callable[[], object]] = [
        lambda: trainer.export(tmp_path / "weights.safetensors"),
        lambda: trainer.publish("torn"),
    ]
    for call in refused:
        with pytest.raises(trocar.errors.TrainerBrokenError, match="restore it from a checkpoint"):
            call()
    assert trainer.info().state == "broken"
    running.run(lambda: own.export(has_optimizer=False, is_gradients=True))
    trainer.restore(first.number)
    assert_weights(trainer, stepped_plainly(given[:1]), tmp_path)
    assert trainer.publish("whole") == "whole"


def test_an_adapter_that_was_half_updated_is_not_exported(
    client: trocar.Client, running: RunningServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = {
        "lora": trocar.training.lora({"fc": 2}, name="a"),
        "optimizer": trocar.training.sgd(lr=0.05, in_backward=True),
    }
    trainer, given = make_trainer(client, **options), batches(2)
    trainer.step(*given[0])
    first = trainer.save()
    whole = load_file(trainer.export_adapter(tmp_path / "first") / ADAPTER_WEIGHTS)
    (own,) = running.app.trainers.all()
    with monkeypatch.context() as patch:
        patch.setattr(own.core._updater.optimizer, "step", Mock(side_effect=[None, RuntimeError("no")]))
        with pytest.raises(trocar.errors.TrainerBrokenError):
            trainer.step(*given[1])
    with pytest.raises(trocar.errors.TrainerBrokenError, match="restore it from a checkpoint"):
        trainer.export_adapter(tmp_path / "torn")
    assert not (tmp_path / "torn" / ADAPTER_WEIGHTS).exists()
    trainer.restore(first.number)
    again = load_file(trainer.export_adapter(tmp_path / "second") / ADAPTER_WEIGHTS)
    assert whole.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


def test_a_trainer_with_a_spool_that_is_not_restored_leaves_no_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spools = Mock()
    monkeypatch.setattr("trocar_server.training.step.saved_tensors.SPOOLING", spools)
    settings: dict[str, Any] = {"models": MODELS, "data_dir": tmp_path / "data", "device": "cpu"}
    with running_server(**settings) as server, trocar.connect(server.address) as client:
        make_trainer(client, saved_tensors=trocar.training.save_on_disk()).save()
    other = ServiceError(ErrorReason.TRAINER_INVALID, "its model has other weights")
    monkeypatch.setattr("trocar_server.training.trainer_builder.check_base", Mock(side_effect=other))
    with running_server(**settings):
        pass
    assert spools.begin.call_count == spools.end.call_count == 2


def test_a_trainer_that_is_not_restored_keeps_no_weights_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"data_dir": tmp_path / "data", "device": "cpu"}
    with running_server(models=MODELS, **settings) as server, trocar.connect(server.address) as client:
        make_trainer(client).save()
    made: list[weakref.ref[TrainerCore]] = []

    def make(*arguments: Any) -> TrainerCore:
        core = TrainerCore(*arguments)
        made.append(weakref.ref(core))
        return core

    monkeypatch.setattr("trocar_server.training.trainer_builder.TrainerCore", make)
    changed = {"tiny": MODELS["tiny"] | {"weights": "random:1"}}
    with running_server(models=changed, **settings) as server, trocar.connect(server.address) as client:
        for count in (1, 2):  # the second call tries again
            server.on_owner(lambda: None)  # its thread keeps its last work until there is other work
            gc.collect()
            assert [core() for core in made] == [None] * count
            with pytest.raises(
                trocar.errors.ModelConflictError, match="not those that the trainer was created"
            ):
                client.trainer(server.app.trainers.unreadable()[0].trainer_id).info()


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
