"""Trainers beside each other: nobody sees or disturbs anybody, and memory is counted once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import trocar
from tests.support.models.trainable_nets import SHAPE, TinyNet
from tests.support.oracles.tiny_training import (
    MODELS,
    assert_weights,
    batches,
    fitted_plainly,
    make_trainer,
    samples,
    stepped_plainly,
)
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom, rebuilt

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.servers.running_server import RunningServer
    from tests.support.servers.serving import Serve

ABSENT = "0" * 32
WATCHERS = 50


@pytest.fixture
def running(serve: Serve, tmp_path: Path) -> RunningServer:
    models = {**MODELS, "teacher": custom(TinyNet, SHAPE, weights="random:1")}
    return serve(models=models, data_dir=tmp_path / "data", limits={"max_trainers": 3})


def calls_of(client: trocar.Client, trainer_id: str, folder: Path) -> dict[str, Callable[[], Any]]:
    """Every call that takes a trainer's id."""
    images, labels = samples(4)
    trainer = trocar.training.Trainer(client, trainer_id)
    return {
        "info": trainer.info,
        "step": lambda: trainer.step(images, labels, number=0),
        "forward_backward": lambda: trainer.forward_backward(images, labels, number=0),
        "optimizer_step": lambda: trainer.optimizer_step(number=0),
        "evaluate": lambda: trainer.evaluate(images, labels),
        "save": trainer.save,
        "restore": trainer.restore,
        "restore one": lambda: trainer.restore(1),
        "checkpoints": trainer.checkpoints,
        "export": lambda: trainer.export(folder / "stolen.safetensors"),
        "parameter_gradients": trainer.parameter_gradients,
        "publish as": lambda: make_trainer(client).publish(trainer_id),
        "publish": lambda: trainer.publish("stolen"),
        "start_fit": lambda: trainer.start_fit("1" * 32),
        "watch": lambda: list(trainer.watch()),
        "watch from": lambda: list(trainer.watch(0)),
        "pause": trainer.pause,
        "resume": trainer.resume,
        "cancel": trainer.cancel,
        "predict": lambda: trainer.predict(images),
        "extract": lambda: trainer.extract(images, "fc"),
        "weights": lambda: trainer.extract(None, "fc/param(weight)"),
        "gradients": lambda: trainer.gradients(images, of=trocar.logit(1), at="conv"),
        "modules": lambda: client.modules(trainer_id),
        "model": lambda: client.model(trainer_id),
        "load": lambda: client.load(trainer_id),
        "unload": lambda: client.unload(trainer_id),
        "stream": lambda: list(client.extract_stream(trainer_id, [images], taps="fc")),
        "as a base": lambda: client.train(trainer_id),
        "as a teacher": lambda: client.train(
            "tiny", losses=trocar.training.loss_term("mse", teacher=trocar.training.teacher(trainer_id))
        ),
    }


def refusal(call: Callable[[], Any], trainer_id: str) -> tuple[type[Exception], str]:
    with pytest.raises(trocar.TrocarError) as caught:
        call()
    return type(caught.value), str(caught.value).replace(trainer_id, "ID")


def test_what_is_not_yours_reads_as_if_it_were_not_there(running: RunningServer, tmp_path: Path) -> None:
    with (
        trocar.connect(running.address, token="alice") as alice,
        trocar.connect(running.address, token="bob") as bob,
    ):
        mine = make_trainer(alice)
        mine.step(*samples(4))
        mine.save()
        before = mine.info()
        theirs = calls_of(bob, mine.trainer_id, tmp_path)
        absent = calls_of(bob, ABSENT, tmp_path)
        different = {
            name: (refusal(call, mine.trainer_id), refusal(absent[name], ABSENT))
            for name, call in theirs.items()
        }
        assert {name: pair for name, pair in different.items() if pair[0] != pair[1]} == {}
        after = mine.info()
        assert (after.update_count, after.next_number) == (before.update_count, before.next_number)
        dataset = alice.upload_dataset(samples(8)).dataset_id
        own = make_trainer(bob)
        refused = [refusal(lambda: own.start_fit(used), used) for used in (dataset, "f" * 32)]  # noqa: B023
        assert refused[0] == refused[1]


def test_frozen_weights_are_in_memory_once(client: trocar.Client, running: RunningServer) -> None:
    trainers = [make_trainer(client, trainable="fc") for _ in range(2)]
    base = dict(running.engine.catalogue.loaded("tiny").module.named_parameters())
    for own in running.app.trainers.all():
        for name, parameter in own.core.module.named_parameters():
            is_shared = parameter.data_ptr() == base[name].data_ptr()
            assert is_shared is not name.startswith("fc.")
    head_bytes = 4 * (4 * 144 + 4)
    assert all(head_bytes <= trainer.info().byte_count < 2 * head_bytes for trainer in trainers)


def test_two_trainers_a_fit_extraction_and_edits_at_once(
    client: trocar.Client, running: RunningServer, tmp_path: Path
) -> None:
    given, data = batches(60), samples(40, 11)
    images = samples(4)[0]
    expected, _ = fitted_plainly(data, 8, 4)
    before = client.extract("tiny", images, taps=["conv", "fc"])
    edited = client.extract("tiny", images, taps="fc", edits=trocar.edit("norm", "scale", 2.0))
    stepping, fitting = make_trainer(client), make_trainer(client)
    first = fitting.start_fit(data, epochs=8, batch_size=4)

    def work(number: int) -> None:
        stepping.step(*given[number], number=number)
        assert np.array_equal(client.extract("tiny", images, taps="conv")["conv"], before["conv"])
        found = client.extract("tiny", images, taps="fc", edits=trocar.edit("norm", "scale", 2.0))
        assert np.array_equal(found["fc"], edited["fc"])
        stepping.predict(images)
        fitting.extract(images, "norm", edits=trocar.edit("conv", "scale", 0.0))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(len(given))))
    assert list(fitting.watch(first))[-1].kind == "finished"
    assert_weights(stepping, stepped_plainly(given), tmp_path)
    assert_weights(fitting, expected, tmp_path)
    hosted = running.engine.catalogue.loaded("tiny").module.state_dict()
    plain = rebuilt(TinyNet).state_dict()
    assert all(torch.equal(value, hosted[name]) for name, value in plain.items())


def test_who_is_not_used_is_closed(
    client: trocar.Client, running: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = make_trainer(client, ttl_s=60.0), make_trainer(client, ttl_s=600.0)
    fitting = make_trainer(client, ttl_s=1.0)
    fitting.start_fit(samples(8), epochs=100_000, batch_size=8)
    now = time.time()
    monkeypatch.setattr("trocar_server.training.trainers.time.time", lambda: now + 120)
    running.run(running.app.trainers.close_expired)
    monkeypatch.undo()
    ids = {info.trainer_id for info in client.trainers()}
    assert ids == {long.trainer_id, fitting.trainer_id}
    with pytest.raises(trocar.errors.UnknownTrainerError):
        short.step(*samples(4))
    assert {path.name for path in (tmp_path / "data" / "trainers").iterdir()} == {*ids, "lock"}


def test_who_has_expired_takes_no_room_and_no_name(
    client: trocar.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even until the next sweep, which is once a minute."""
    adapter = trocar.training.lora({"fc": 2}, name="style")
    expired = [
        make_trainer(client, ttl_s=60.0, lora=adapter, trainable=()),
        *(make_trainer(client, ttl_s=60.0) for _ in range(2)),
    ]
    with pytest.raises(trocar.errors.QuotaExceededError):
        make_trainer(client)
    now = time.time()
    monkeypatch.setattr("trocar_server.training.trainers.time.time", lambda: now + 120)
    again = make_trainer(client, lora=adapter, trainable=())
    monkeypatch.undo()
    assert [info.trainer_id for info in client.trainers()] == [again.trainer_id]
    with pytest.raises(trocar.errors.UnknownTrainerError):
        expired[0].info()


class Clock:
    """Seconds since 1970, some of them ahead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._time, self.ahead_s = time.time, 0.0
        monkeypatch.setattr(time, "time", lambda: self._time() + self.ahead_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize("call", ["predict", "extract", "gradients", "stream"])
def test_a_trainer_whose_model_is_used_is_not_closed(
    client: trocar.Client, running: RunningServer, clock: Clock, call: str
) -> None:
    trainer, images = make_trainer(client, ttl_s=60.0), samples(4)[0]
    calls: dict[str, Callable[[], object]] = {
        "predict": lambda: client.predict(trainer.trainer_id, images),
        "extract": lambda: client.extract(trainer.trainer_id, images, "fc"),
        "gradients": lambda: client.gradients(trainer.trainer_id, images, of=trocar.logit(1), at="fc"),
        "stream": lambda: list(client.extract_stream(trainer.trainer_id, [images], "fc")),
    }
    clock.ahead_s = 50.0
    calls[call]()
    clock.ahead_s = 100.0
    running.run(running.app.trainers.close_expired)
    assert [info.trainer_id for info in client.trainers()] == [trainer.trainer_id]
    clock.ahead_s = 200.0
    running.run(running.app.trainers.close_expired)
    assert client.trainers() == []


@pytest.mark.parametrize("name", ["step", "evaluate", "state"])
def test_a_trainer_is_not_closed_during_a_call_that_takes_longer_than_it_may_be_unused(
    client: trocar.Client,
    running: RunningServer,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    trainer = make_trainer(client, ttl_s=60.0)
    (own,) = running.app.trainers.all()
    work, began, may_end = getattr(own.core, name), threading.Event(), threading.Event()
    closed: list[object] = []

    def slow(*arguments: Any) -> Any:
        began.set()
        assert may_end.wait(30)
        return work(*arguments)

    async def close(found: object) -> None:
        closed.append(found)

    monkeypatch.setattr(own.core, name, slow)
    monkeypatch.setattr(running.app.trainers, "close", close)
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: trainer.step(*samples(4)),
        "evaluate": lambda: trainer.evaluate(*samples(4)),
        "state": trainer.save,
    }
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(calls[name])
        assert began.wait(30)
        clock.ahead_s = 120.0
        running.run(running.app.trainers.close_expired)
        may_end.set()
        calling.result(30)
    clock.ahead_s = 150.0
    running.run(running.app.trainers.close_expired)
    assert closed == []
    clock.ahead_s = 300.0
    running.run(running.app.trainers.close_expired)
    assert closed == [own]


def test_there_are_so_many_trainers_and_no_more(client: trocar.Client) -> None:
    made = [make_trainer(client) for _ in range(3)]
    with pytest.raises(trocar.errors.QuotaExceededError, match="close one"):
        make_trainer(client)
    made[0].close()
    make_trainer(client)


def repeated(call: Callable[[], Any], errors: list[Exception]) -> None:
    """Call until it fails."""
    try:
        while True:
            call()
    except trocar.TrocarError as error:
        errors.append(error)


@pytest.mark.parametrize("is_fitting", [True, False])
def test_closing_while_everything_happens(
    client: trocar.Client, running: RunningServer, tmp_path: Path, is_fitting: bool
) -> None:
    """Steps, a fit, saving, publishing and watching end with a typed error, and nothing is left."""
    for attempt in range(3):
        trainer, errors = make_trainer(client), list[Exception]()
        calls: list[Callable[[], Any]] = [
            partial(trainer.evaluate, *samples(4)),
            trainer.info,
            partial(trainer.publish, f"model-{attempt}"),
            partial(trainer.predict, samples(4)[0]),
        ]
        if is_fitting:
            trainer.start_fit(samples(16), epochs=100_000, batch_size=8)
            calls.append(lambda: list(trainer.watch()))  # noqa: B023 - ends within the loop
        else:
            calls += [partial(trainer.step, *samples(4)), trainer.save]
        threads = [threading.Thread(target=repeated, args=(call, errors)) for call in calls]
        for thread in threads:
            thread.start()
        while not errors:  # until it has been published, and is to be published again
            trainer.info()
        trainer.close()
        for thread in threads:
            thread.join()
        allowed = (
            trocar.errors.UnknownTrainerError,
            trocar.errors.UnknownModelError,
            trocar.errors.ModelConflictError,
        )
        assert [error for error in errors if not isinstance(error, allowed)] == []
    assert running.app.trainers.all() == []
    assert {path.name for path in (tmp_path / "data" / "trainers").iterdir()} == {"lock"}
    assert not list((tmp_path / "data").rglob("*.jsonl"))


def test_a_base_and_a_teacher_that_are_unloaded(tmp_path: Path) -> None:
    """The trainer has what it needs, and comes back after a restart, which loads them again."""
    settings: dict[str, Any] = {
        "models": {**MODELS, "teacher": custom(TinyNet, SHAPE, weights="random:1")},
        "device": "cpu",
        "data_dir": tmp_path / "data",
    }
    losses = ["cross_entropy", trocar.training.loss_term("mse", teacher=trocar.training.teacher("teacher"))]
    with running_server(**settings) as first, trocar.connect(first.address) as client:
        trainer = make_trainer(client, losses=losses, trainable="fc")
        client.unload("tiny")
        client.unload("teacher")
        trainer.step(*samples(4))
        trainer.save()
        predicted = trainer.predict(samples(4)[0])
        with pytest.raises(trocar.errors.ModelNotLoadedError):
            trainer.publish("tuned")
        trainer_id = trainer.trainer_id
    with running_server(**settings) as second, trocar.connect(second.address) as client:
        found = client.trainer(trainer_id)
        assert np.array_equal(found.predict(samples(4)[0]), predicted)
        assert found.step(*samples(4)).is_update
        assert found.publish("tuned") == "tuned"


def test_many_watchers_and_one_that_does_not_read(client: trocar.Client, running: RunningServer) -> None:
    data = samples(40, 11)
    trainer = make_trainer(client)
    first = trainer.start_fit(data, epochs=10, batch_size=2)
    with trocar.connect(running.address) as other:
        stalled = trocar.training.Trainer(other, trainer.trainer_id).watch(first)
        next(iter(stalled))  # and no more

        def watch(_: int) -> list[int]:
            with trocar.connect(running.address) as own:
                return [
                    event.number for event in trocar.training.Trainer(own, trainer.trainer_id).watch(first)
                ]

        with ThreadPoolExecutor(WATCHERS) as pool:
            seen = list(pool.map(watch, range(WATCHERS)))
        assert all(numbers == seen[0] for numbers in seen)
        assert seen[0] == list(range(first, first + len(seen[0])))
        assert len(seen[0]) > 200
        stalled.close()  # type: ignore[attr-defined]
    assert trainer.step(*samples(4)).is_update
