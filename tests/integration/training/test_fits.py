"""Fits on the server, against the same epochs in plain torch: bit-equal on a CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import trocar
from tests.integration.training.test_trainers import (
    SEED,
    assert_equal,
    base_model,
    exported,
    make_trainer,
    with_head,
)
from tests.support.oracles import tiny_training
from tests.support.servers import warm_python
from tests.support.servers.running_server import RunningServer, running_server
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.files.checkpoints import CheckpointStore
from trocar_server.training.files.owner_folders import OwnerFolders
from trocar_server.training.fit.events import FitEvent
from trocar_server.training.fit.fit_run import FitRun
from trocar_server.training.phases import FitSignal
from trocar_server.training.trainer import Trainer

if TYPE_CHECKING:
    from tests.support.servers.serving import Serve

COUNT, BATCH, EPOCHS = 22, 8, 3
Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def samples(count: int = COUNT, seed: int = 3) -> Arrays:
    random = np.random.default_rng(seed)
    labels = np.arange(count) % 10
    return random.normal(size=(count, 3, 32, 32)).astype(np.float32), labels


def fitted_plainly(trainable: tuple[str, ...], epochs: int = EPOCHS) -> Any:
    """Run the epochs in plain torch."""
    images, labels = map(torch.from_numpy, samples())
    model = with_head(base_model())
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith(trainable)
    for path, module in model.named_modules():
        module.training = any(parameter.requires_grad for parameter in module.parameters()) or path == ""
    for parameter in model.fc.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(chosen, lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(SEED + epoch))
        for indices in order.split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(images[indices]), labels[indices]).backward()
            optimizer.step()
    return model


@pytest.fixture
def running(serve: Serve, tmp_path: Path) -> RunningServer:
    """A server with resnet18, and trainers of its own."""
    return serve(models={"resnet18": {"weights": "random:0"}}, data_dir=tmp_path)


@pytest.mark.parametrize("trainable", [("fc",), ("layer4", "fc")])
@pytest.mark.parametrize("is_cached", [True, False])
def test_a_fit_is_bit_equal_to_the_same_epochs_in_plain_torch(
    client: trocar.Client, tmp_path: Path, trainable: tuple[str, ...], is_cached: bool
) -> None:
    expected = fitted_plainly(trainable)
    trainer = make_trainer(client, trainable)
    history = trainer.fit(
        samples(), epochs=EPOCHS, batch_size=BATCH, eval=samples(10, 4), feature_cache=is_cached
    )
    assert history.outcome == "finished"
    assert [event["step"] for event in history.of_kind("step")] == list(range(1, 10))
    assert len(history.evaluations) == EPOCHS
    assert any(event.get("done") for event in history.of_kind("cache")) == is_cached
    assert_equal(exported(trainer, tmp_path / "fitted.safetensors"), expected)
    with torch.no_grad():
        images, labels = samples(10, 4)
        found = expected.eval()(torch.from_numpy(images)).argmax(1).numpy()
    assert history.evaluations[-1]["metrics"]["accuracy"] == pytest.approx(np.mean(found == labels))


def test_a_share_of_the_data_is_evaluated_and_not_trained_on(client: trocar.Client, tmp_path: Path) -> None:
    images, labels = samples()
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(SEED)).numpy()
    trained, kept = np.sort(order[:-6]), np.sort(order[-6:])  # 0.3 * 22 = 6.6
    split, apart = (make_trainer(client, ("layer4", "fc")) for _ in range(2))
    history = split.fit((images, labels), epochs=EPOCHS, batch_size=BATCH, eval_split=0.3)
    apart.fit((images[trained], labels[trained]), epochs=EPOCHS, batch_size=BATCH)

    first, second = (
        exported(one, tmp_path / name) for one, name in ((split, "a.safetensors"), (apart, "b.safetensors"))
    )
    assert all(torch.equal(first[name], second[name]) for name in second)
    evaluated = apart.evaluate(images[kept], labels[kept])
    last = history.evaluations[-1]
    assert (last["sample_count"], last["metrics"]["accuracy"]) == (6, pytest.approx(evaluated.accuracy))
    assert last["loss"] == pytest.approx(evaluated.loss, rel=1e-5)
    assert len(client.datasets()) == 2


def test_a_batch_that_workers_cannot_divide_is_refused(client: trocar.Client) -> None:
    trainer = make_trainer(client, ("fc",))
    with pytest.raises(trocar.errors.FitInvalidError, match="use a multiple, for example 8"):
        trainer.fit(samples(), batch_size=7, workers=2)


@pytest.mark.parametrize("share", [0.01, 1, -0.1])
def test_a_share_that_is_no_part_is_refused(client: trocar.Client, share: float) -> None:
    trainer = make_trainer(client, ("fc",))
    with pytest.raises(trocar.errors.FitInvalidError, match="eval_split"):
        trainer.fit(samples(), eval_split=share)


def test_whoever_watches_later_sees_everything(client: trocar.Client) -> None:
    trainer = make_trainer(client, ("fc",))
    history = trainer.fit(samples(), epochs=2, batch_size=BATCH)
    assert [event.number for event in history] == list(range(len(history)))
    assert list(trainer.watch()) == list(history)
    assert list(trainer.watch(len(history) - 2)) == list(history)[-2:]
    again = trainer.fit(samples(), epochs=1, batch_size=BATCH)
    assert again[0].number == len(history)
    assert list(trainer.watch()) == list(again)


def test_a_data_set_is_sent_once(client: trocar.Client) -> None:
    trainer = make_trainer(client, ("fc",))
    trainer.fit(samples(), epochs=1, batch_size=BATCH)
    trainer.fit(samples(), epochs=1, batch_size=BATCH)
    assert len(client.datasets()) == 1


def test_pause_and_resume_change_nothing(client: trocar.Client, tmp_path: Path) -> None:
    expected = fitted_plainly(("layer4", "fc"))
    trainer = make_trainer(client, ("layer4", "fc"))
    first = trainer.start_fit(samples(), epochs=EPOCHS, batch_size=BATCH)
    images, labels = samples(4)
    kinds = []
    for event in trainer.watch(first):
        kinds.append(event.kind)
        if event.kind == "step" and event["step"] == 4:
            assert trainer.pause() == "paused"
            assert trainer.info().state == "paused"
            with pytest.raises(trocar.errors.TrainerBusyError):
                trainer.step(images, labels)
            assert trainer.evaluate(images, labels).sample_count == 4
            assert trainer.resume() == "running"
    assert kinds[-1] == "finished"
    assert {"paused", "resumed"} <= set(kinds)
    assert_equal(exported(trainer, tmp_path / "fitted.safetensors"), expected)


def test_a_cancelled_fit_leaves_a_trainer_that_can_be_used(client: trocar.Client) -> None:
    trainer = make_trainer(client, ("layer4",))
    first = trainer.start_fit(samples(), epochs=1000, batch_size=BATCH)
    kinds = []
    for event in trainer.watch(first):
        kinds.append(event.kind)
        if event.kind == "step" and event["step"] == 2:
            assert trainer.cancel() == "ended"
    assert kinds[-1] == "cancelled"
    assert trainer.info().state == "ready"
    images, labels = samples(4)
    assert trainer.step(images, labels).is_update
    with pytest.raises(trocar.errors.UnknownFitError):
        trainer.pause()


def test_every_problem_of_a_fit_is_in_one_error(client: trocar.Client) -> None:
    trainer = make_trainer(client, ("fc",))
    images, labels = samples()
    with pytest.raises(trocar.errors.FitInvalidError) as caught:
        trainer.fit(
            (images, labels + 5),
            eval=(images[:3], labels[:3]),
            metrics=["accuracy", trocar.training.metric("f1", averaged="macro")],
            augment=[trocar.training.augmentation("RandomCrp", size=3)],
            early_stop=trocar.training.early_stop("recall"),
        )
    message = str(caught.value)
    for part in ("10", "RandomCrop", "averaged", "early_stop"):
        assert part in message, message
    with pytest.raises(trocar.errors.UnknownDatasetError):
        trainer.fit("0" * 32)
    assert trainer.info().state == "ready"
    with pytest.raises(trocar.errors.UnknownFitError):
        list(trainer.watch())


def test_early_stopping_ends_a_fit(client: trocar.Client) -> None:
    trainer = make_trainer(client, ("fc",), optimizer=trocar.training.sgd(lr=1e-12))
    history = trainer.fit(
        samples(),
        epochs=50,
        batch_size=BATCH,
        eval=samples(10, 4),
        early_stop=trocar.training.early_stop(patience=2, min_delta=0.1),
    )
    assert len(history.evaluations) == 3
    assert "did not improve" in history[-1]["message"]


def test_a_fit_goes_on_after_a_stop_of_the_server(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "models": {"resnet18": {"weights": "random:0"}},
        "data_dir": tmp_path,
        "device": "cpu",
    }
    expected = fitted_plainly(("layer4", "fc"))
    with running_server(**settings) as first, trocar.connect(first.address) as client:
        trainer = make_trainer(client, ("layer4", "fc"))
        number = trainer.start_fit(samples(), epochs=EPOCHS, batch_size=BATCH)
        seen = []
        for event in trainer.watch(number):
            seen.append(event)
            if event.kind == "step" and event["step"] == 5:
                break
        trainer_id = trainer.trainer_id
    with running_server(**settings) as second, trocar.connect(second.address) as client:
        found = client.trainer(trainer_id)
        events = list(found.watch(number))
        assert events[-1].kind == "finished"
        assert [event.number for event in events] == list(range(len(events)))
        losses = {e["step"]: e["loss"] for e in events if e.kind == "step"}
        assert sorted(losses) == list(range(1, 10))
        assert all(losses[e["step"]] == e["loss"] for e in seen if e.kind == "step")
        assert_equal(exported(found, tmp_path / "fitted.safetensors"), expected)


SERVE = """
import sys, asyncio
from trocar_server.app import app
from trocar_server.config import ServerConfig
models = {"resnet18": {"weights": "random:0"}}
config = ServerConfig(port=0, data_dir=sys.argv[1], device="cpu", models=models)
asyncio.run(app.serve(config, lambda running: print(running.rpc.port, flush=True)))
"""


def start_process(data_dir: Path) -> tuple[subprocess.Popen[str], str]:
    process = warm_python.Popen(
        [sys.executable, "-c", SERVE, str(data_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip().isdigit():
            return process, f"127.0.0.1:{line.strip()}"
    raise AssertionError("the server did not start")


def end(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=120)  # its log goes to stdout: who closes that breaks it
    return process.returncode


def test_a_fit_survives_kill_9_in_the_middle(tmp_path: Path) -> None:
    expected = fitted_plainly(("layer4", "fc"))
    process, address = start_process(tmp_path)
    with trocar.connect(address, retries=0) as client:
        trainer = make_trainer(client, ("layer4", "fc"))
        number = trainer.start_fit(samples(), epochs=EPOCHS, batch_size=BATCH, checkpoint_every=2)
        for event in trainer.watch(number):
            if event.kind == "step" and event["step"] == 5:
                os.kill(process.pid, signal.SIGKILL)
                break
        trainer_id = trainer.trainer_id
    end(process)
    process, address = start_process(tmp_path)
    try:
        with trocar.connect(address) as client:
            found = client.trainer(trainer_id)
            events = list(found.watch(number))
            assert events[-1].kind == "finished", events[-1]
            assert [event.number for event in events] == list(range(len(events)))
            assert_equal(exported(found, tmp_path / "fitted.safetensors"), expected)
    finally:
        process.terminate()
        assert end(process) == 0


def test_a_lost_connection_changes_nothing(running: RunningServer, client: trocar.Client) -> None:
    trainer = make_trainer(client, ("fc",))
    number = trainer.start_fit(samples(), epochs=30, batch_size=BATCH)
    threads = []
    for _ in range(3):  # who goes in the middle disturbs nobody

        def leave() -> None:
            with trocar.connect(running.address) as other:
                for event in trocar.training.Trainer(other, trainer.trainer_id).watch(number):
                    if event.kind == "step":
                        break

        threads.append(threading.Thread(target=leave))
        threads[-1].start()
    events = list(trainer.watch(number))
    for thread in threads:
        thread.join()
    assert events[-1].kind == "finished"
    assert [event.number for event in events] == list(range(len(events)))


def end_behind_an_evaluation(patch: pytest.MonkeyPatch, kind: str) -> None:
    """Let fits of two epochs be cancelled after the last evaluation, or fail at the checkpoint behind it."""
    tell, save = FitRun.tell, CheckpointStore.save

    def fail_once(*_: Any, **__: Any) -> None:
        patch.setattr(CheckpointStore, "save", save)
        raise ServiceError(ErrorReason.STORAGE_FULL, "the disk is full")

    async def telling(run: FitRun, events: list[FitEvent]) -> None:
        await tell(run, events)
        if any((event.kind, event.epoch) == ("evaluation", 1) for event in events):
            if kind == "cancelled":
                run.send(FitSignal.CANCEL)
            else:
                patch.setattr(CheckpointStore, "save", fail_once)

    patch.setattr(FitRun, "tell", telling)


@contextmanager
def server_of(folder: Path, owner: str = "") -> Iterator[tuple[RunningServer, trocar.Client]]:
    """Run a server of the tiny net, with a name on a cluster."""
    settings: dict[str, Any] = {"data_dir": folder / "data", "device": "cpu", "models": tiny_training.MODELS}
    owners = OwnerFolders(folder / "owners", owner) if owner else None
    with running_server(owners=owners, **settings) as server, trocar.connect(server.address) as client:
        yield server, client


@pytest.mark.parametrize("kind", ["cancelled", "failed"])
def test_a_stop_saves_the_rates_that_the_last_evaluation_of_a_fit_has_lowered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Although a checkpoint was written after the last step: the schedule has changed since."""
    end_behind_an_evaluation(monkeypatch, kind)
    with server_of(tmp_path) as (_, client):
        trainer_id, rate = fitted_with_a_plateau(client, kind)
    with server_of(tmp_path) as (_, client):
        assert client.trainer(trainer_id).info().learning_rates == (rate,)


def fitted_with_a_plateau(client: trocar.Client, kind: str) -> tuple[str, float]:
    """Run a fit whose end is of this kind; return its trainer, and the rate by torch's own scheduler."""
    options: dict[str, Any] = {"patience": 0, "threshold": 0.999}
    trainer = tiny_training.make_trainer(client, schedule=trocar.training.schedule("plateau", **options))
    data, evaluated = tiny_training.samples(8), tiny_training.samples(4, 1)
    first = trainer.start_fit(data, eval=evaluated, epochs=2, batch_size=4, checkpoint_every=2)
    events = list(trainer.watch(first))
    assert [event.kind for event in events[-3:]] == ["checkpoint", "evaluation", kind]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.05)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options)
    for event in events:
        if event.kind == "evaluation":
            plateau.step(event["loss"])
    rate = optimizer.param_groups[0]["lr"]
    assert rate < 0.05
    return trainer.trainer_id, rate


def test_another_server_repeats_steps_with_the_rates_that_an_evaluation_has_lowered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_behind_an_evaluation(monkeypatch, "cancelled")
    monkeypatch.setattr(Trainer, "save_changes", AsyncMock())  # as if the server was killed
    with server_of(tmp_path, "a") as (_, client):
        trainer_id, rate = fitted_with_a_plateau(client, "cancelled")
        trainer = client.trainer(trainer_id)
        assert trainer.step(*tiny_training.samples(4, 2)).learning_rates == (rate,)
        expected = exported(trainer, tmp_path / "before.safetensors")
    with server_of(tmp_path, "b") as (server, client):
        server.run(lambda: server.app.trainers.take_over("a", trainer_id))
        found = exported(client.trainer(trainer_id), tmp_path / "after.safetensors")
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def test_another_server_knows_the_length_of_a_fit_that_could_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are taken with it, so they must be repeated with it."""
    monkeypatch.setattr(Trainer, "save_changes", AsyncMock())  # as if the server was killed
    given = tiny_training.batches(3)
    with server_of(tmp_path, "a") as (_, client):
        trainer = tiny_training.make_trainer(client, schedule=trocar.training.schedule("cosine"))
        full = ServiceError(ErrorReason.STORAGE_FULL, "the disk is full")
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointStore, "save", Mock(side_effect=full))
            with pytest.raises(trocar.errors.StorageFullError):
                trainer.start_fit(tiny_training.samples(8), epochs=2, batch_size=4)
        trainer.step(*given[0])
        trainer.step(*given[1])
    with server_of(tmp_path, "b") as (server, client):
        server.run(lambda: server.app.trainers.take_over("a", trainer.trainer_id))
        trainer = client.trainer(trainer.trainer_id)
        assert trainer.info().next_number == 2
        (rate,) = trainer.step(*given[2]).learning_rates
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.05)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    for _ in range(2):
        optimizer.step()
        cosine.step()
    assert rate == optimizer.param_groups[0]["lr"]
