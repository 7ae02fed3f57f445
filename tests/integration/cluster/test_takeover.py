"""Trainers of a lost replica, taken over by another one on shared storage: fences, results, continuation."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.support.oracles.tiny_training import (
    PlainTrainer,
    assert_weights,
    fitted_plainly,
    make_trainer,
    samples,
)
from tests.support.servers.gateway import Gateway, is_serving
from tests.support.servers.replicas import Replicas
from tests.support.servers.running_server import RunningServer
from tests.support.servers.waiting import wait_until
from tests.support.wire.wire import raw_channel, unary_call
from trocar._wire.trainer_requests import TrainerOptions, trainer_spec
from trocar.errors import (
    CheckpointCorruptError,
    NonFiniteStepError,
    QuotaExceededError,
    TrainerBusyError,
    UnknownTrainerError,
)
from trocar_api.reasons import ErrorReason
from trocar_api.v1.trainer_pb2 import CreateTrainerRequest, CreateTrainerResponse
from trocar_server.errors import ServiceError
from trocar_server.training import trainer as trainer_module
from trocar_server.training.files.step_journal import StepJournal
from trocar_server.training.fit import fitting as fitting_module
from trocar_server.training.step.core import TrainerCore

WAIT_S = 60.0


def make_steps(client: trocar.Client, count: int) -> trocar.training.Trainer:
    """Make a trainer, and the first steps of it."""
    trainer = make_trainer(client)
    for number in range(count):
        trainer.step(*samples(4, number))
    return trainer


def plain_steps(count: int) -> PlainTrainer:
    plain = PlainTrainer()
    for number in range(count):
        plain.step(samples(4, number))
    return plain


def test_every_acknowledged_step_is_there(replicas: Replicas, clients: Any, tmp_path: Path) -> None:
    first, second = replicas.start(), replicas.start()
    trainer = make_trainer(clients(first))
    losses = [trainer.step(*samples(4, number)).loss for number in range(3)]
    trainer.save()
    losses += [trainer.step(*samples(4, number)).loss for number in range(3, 5)]
    replicas.lose(by=second)
    again = clients(second).trainer(trainer.trainer_id)
    assert again.info().next_number == 5
    # the repeated call of a client that got no reply
    assert again.step(*samples(4, 4), number=4).loss == losses[4]
    assert again.step(*samples(4, 2), number=2).loss == losses[2]
    losses.append(again.step(*samples(4, 5), number=5).loss)
    plain = PlainTrainer()
    assert [plain.step(samples(4, number)) for number in range(6)] == losses
    assert_weights(again, plain.model, tmp_path)


@pytest.mark.parametrize("turn_s", [0.0, 60.0])
def test_long_journals_are_repeated_piece_by_piece(
    replicas: Replicas, clients: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn_s: float
) -> None:
    monkeypatch.setattr(trainer_module, "_REPEAT_S", turn_s)  # one call in a turn, or as many as were read
    first, second = replicas.start(), replicas.start()
    trainer = make_steps(clients(first), 70)
    replicas.lose(by=second)
    again = clients(second).trainer(trainer.trainer_id)
    assert again.info().next_number == 70
    plain = plain_steps(70)
    assert_weights(again, plain.model, tmp_path)
    # the journal counts against its limits as if its calls had been made here
    (taken,) = second.app.trainers.all()
    assert taken.durable is not None
    assert taken.durable.byte_count == 70 * sum(array.nbytes for array in samples(4, 0))
    assert taken.durable.compute_s > 0
    for number in range(6, 70):  # the last 64 calls can still be repeated
        again.step(*samples(4, number), number=number)
    assert again.step(*samples(4, 70), number=70).loss == plain.step(samples(4, 70))


def test_the_late_owner_changes_nothing(replicas: Replicas, clients: Any, tmp_path: Path) -> None:
    first, second = replicas.start(), replicas.start()
    late = make_steps(clients(first), 2)
    replicas.lose(by=second)
    trainer = clients(second).trainer(late.trainer_id)
    trainer.step(*samples(4, 2))
    for call in (late.save, lambda: late.step(*samples(4, 9)), late.restore, late.info):
        with pytest.raises(UnknownTrainerError, match="at another replica of the cluster"):
            call()
    trainer.step(*samples(4, 3))
    assert_weights(trainer, plain_steps(4).model, tmp_path)
    assert [path.name for path in replicas.root.glob("*/*") if path.is_dir()] == [trainer.trainer_id]


@pytest.mark.parametrize("moment", ["replace", "unlink_after"])
def test_an_owner_that_sleeps_while_it_commits(
    replicas: Replicas, clients: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It is stopped between the bytes of a step and the rename that commits them, or right after that."""
    first, second = replicas.start(), replicas.start()
    late = make_trainer(clients(first))
    late.step(*samples(4, 0))
    asleep, awake, original = threading.Event(), threading.Event(), os.replace

    def replace(source: Path, target: Path) -> None:
        if not asleep.is_set() and target.name.startswith("step-"):
            if moment != "replace":
                original(source, target)
            asleep.set()
            assert awake.wait(WAIT_S)
            if moment != "replace":
                return
        original(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(late.step, *samples(4, 1))
        assert asleep.wait(WAIT_S)
        replicas.lose(by=second)
        trainer = clients(second).trainer(late.trainer_id)
        reached = trainer.info().next_number
        assert reached == (1 if moment == "replace" else 2)
        repeated = trainer.step(*samples(4, 1), number=1).loss
        awake.set()
        if moment == "replace":
            with pytest.raises(UnknownTrainerError, match="another replica"):
                call.result(WAIT_S)
        else:  # the step was durable: both may say so, and they say the same
            problem = call.exception(WAIT_S)
            assert isinstance(problem, UnknownTrainerError) or call.result().loss == repeated
    trainer.step(*samples(4, 2))
    assert_weights(trainer, plain_steps(3).model, tmp_path)


@pytest.mark.parametrize("is_same", [False, True])
def test_a_takeover_that_the_disk_cut_off_is_ended_later(
    replicas: Replicas, clients: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_same: bool
) -> None:
    first, second = replicas.start(), replicas.start()
    trainer = make_trainer(clients(first))
    trainer.save()
    trainer.step(*samples(4, 0))
    original, left = os.rename, [2]

    def rename(source: Path, target: Path) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(5, "Input/output error")
        original(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(Exception, match="disk failed"):
        replicas.lose(by=second)
    monkeypatch.setattr(os, "rename", original)
    last = second if is_same else replicas.start()
    replicas.lose(by=last)
    again = clients(last).trainer(trainer.trainer_id)
    again.step(*samples(4, 1))
    assert_weights(again, plain_steps(2).model, tmp_path)


def test_failed_steps_and_restores_leave_the_journal_right(
    replicas: Replicas, clients: Any, tmp_path: Path
) -> None:
    first, second = replicas.start(), replicas.start()
    trainer = make_trainer(clients(first))
    trainer.step(*samples(4, 0))
    saved = trainer.save()
    trainer.step(*samples(4, 7))
    images, labels = samples(4, 8)
    with pytest.raises(NonFiniteStepError):
        trainer.step(images * float("nan"), labels)
    trainer.restore(saved.number)
    trainer.step(*samples(4, 1))
    replicas.lose(by=second)
    again = clients(second).trainer(trainer.trainer_id)
    assert again.info().next_number == 2
    again.forward_backward(*samples(4, 2))
    again.optimizer_step()
    third = replicas.start()
    replicas.lose(by=third)
    assert_weights(clients(third).trainer(trainer.trainer_id), plain_steps(3).model, tmp_path)


def test_a_damaged_trainer_is_told_and_keeps_no_other(replicas: Replicas, clients: Any) -> None:
    first, second = replicas.start(), replicas.start()
    damaged, *whole = sorted(
        (make_steps(clients(first), 2) for _ in range(3)), key=lambda one: one.trainer_id
    )
    damaged.save()  # names its owner, too
    record = replicas.root / "replica-0" / damaged.trainer_id / "trainer.json"
    record.write_bytes(record.read_bytes()[:-1])
    replicas.lose(by=second)
    client = clients(second)
    assert [client.trainer(trainer.trainer_id).info().next_number for trainer in whole] == [2, 2]
    with pytest.raises(CheckpointCorruptError, match=r"description of the trainer .* is damaged"):
        client.trainer(damaged.trainer_id).info()


@pytest.mark.parametrize("failing", [2, 4])
def test_a_step_whose_repetition_fails_in_passing_is_not_lost(
    replicas: Replicas, clients: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    first, second = replicas.start(), replicas.start()
    trainer = make_steps(clients(first), 5)
    step = TrainerCore.step

    def fail(core: TrainerCore, *given: Any) -> Any:
        if core.step_count == failing:
            raise ServiceError(ErrorReason.OUT_OF_MEMORY, "the device is full right now")
        return step(core, *given)

    monkeypatch.setattr(TrainerCore, "step", fail)
    replicas.lose(by=second)
    monkeypatch.setattr(TrainerCore, "step", step)
    again = clients(second).trainer(trainer.trainer_id)
    assert again.info().next_number == 5
    assert_weights(again, plain_steps(5).model, tmp_path)


def test_only_the_last_step_may_fail_again(
    replicas: Replicas, clients: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server was lost before it had removed the entry of a step that failed."""
    first, second = replicas.start(), replicas.start()
    trainer = make_steps(clients(first), 2)
    monkeypatch.setattr(StepJournal, "discard", lambda *_: None)
    with pytest.raises(NonFiniteStepError):
        trainer.step(np.full_like(samples(4)[0], np.nan), samples(4)[1])
    replicas.lose(by=second)
    again = clients(second).trainer(trainer.trainer_id)
    again.step(*samples(4, 2), number=2)
    assert_weights(again, plain_steps(3).model, tmp_path)


def test_steps_that_the_disk_has_lost_are_told(replicas: Replicas, clients: Any, tmp_path: Path) -> None:
    first, second, third = (replicas.start() for _ in range(3))
    trainer = make_steps(clients(first), 5)
    entry = sorted(replicas.root.glob("replica-0/*/step-*"))[2]
    entry.write_bytes(entry.read_bytes()[:-1])
    replicas.lose(by=second)
    again = clients(second).trainer(trainer.trainer_id)
    (notice,) = again.info().notices
    assert "damaged at step 2" in notice
    again.step(*samples(4, 2), number=2)
    replicas.lose(by=third)  # what followed the damaged one is not repeated
    last = clients(third).trainer(trainer.trainer_id)
    assert (last.info().next_number, last.info().notices) == (3, ())
    assert_weights(last, plain_steps(3).model, tmp_path)


def test_a_fit_goes_on(replicas: Replicas, clients: Any, tmp_path: Path) -> None:
    data, epochs, batch_size = samples(40, 11), 20, 4
    expected, losses = fitted_plainly(data, epochs, batch_size)
    first, second = replicas.start(), replicas.start()
    trainer = make_trainer(clients(first))
    late = clients(first).trainer(trainer.trainer_id)
    number = trainer.start_fit(data, epochs=epochs, batch_size=batch_size, checkpoint_every=4)
    events = trainer.watch(number)
    for event in events:
        if event.kind == "checkpoint":
            break
    replicas.lose(by=second)
    with pytest.raises(UnknownTrainerError, match="another replica"):
        late.info()
    with pytest.raises(UnknownTrainerError, match="another replica"):
        list(events)
    again = clients(second).trainer(trainer.trainer_id)
    seen = list(again.watch(number))
    assert [event.number for event in seen] == list(range(number, number + len(seen)))
    assert [event["loss"] for event in seen if event.kind == "step"] == losses
    assert_weights(again, expected, tmp_path)


def test_a_fit_that_begins_again_slowly_holds_up_no_other_trainer(
    replicas: Replicas, clients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = replicas.start(), replicas.start()
    fitting, others = make_trainer(clients(first)), [make_trainer(clients(first)) for _ in range(2)]
    number = fitting.start_fit(samples(40, 11), epochs=2000, batch_size=4, checkpoint_every=4)
    next(event for event in fitting.watch(number) if event.kind == "checkpoint")
    may_begin = threading.Event()
    monkeypatch.setattr(fitting_module, "import_parts", lambda *_: may_begin.wait(WAIT_S))
    replicas.lose(by=second)
    for trainer in others:
        clients(second).trainer(trainer.trainer_id).step(*samples(4))
    again = clients(second).trainer(fitting.trainer_id)
    with pytest.raises(TrainerBusyError):  # a step would come between two of the fit
        again.step(*samples(4))
    with ThreadPoolExecutor() as pool:
        cancelled = pool.submit(again.cancel)
        may_begin.set()
        assert cancelled.result(WAIT_S) == "ended"
    assert [event.kind for event in again.watch(number)][-1] == "cancelled"
    again.step(*samples(4))


def test_a_closed_trainer_leaves_nothing(replicas: Replicas, clients: Any) -> None:
    server = replicas.start()
    trainer = make_trainer(clients(server))
    trainer.fit(samples(8), epochs=1, batch_size=4)
    trainer.step(*samples(4))
    trainer.close()
    assert [path for path in replicas.root.glob("*/*") if path.name != "lock"] == []


def test_the_limit_of_trainers_is_that_of_all_replicas(replicas: Replicas, clients: Any) -> None:
    first, second = (replicas.start(limits={"max_trainers": 2}) for _ in range(2))
    made = make_trainer(clients(first))
    make_trainer(clients(second))
    with pytest.raises(QuotaExceededError, match="you have 2 trainers"):
        make_trainer(clients(second))
    made.close()
    make_trainer(clients(second))
    with trocar.connect(first.address, token="somebody else") as other:
        make_trainer(other)


def test_a_request_makes_one_trainer_whichever_replica_gets_it(replicas: Replicas, clients: Any) -> None:
    first, second = replicas.start(), replicas.start()
    requests = [
        CreateTrainerRequest(spec=trainer_spec(TrainerOptions("tiny")), request_id=f"request-{number}")
        for number in range(4)
    ]
    servers = (first, second, first, second)
    expected = [created(server, request) for server, request in zip(servers, requests, strict=True)]
    with pytest.raises(grpc.RpcError, match="another replica"):
        created(second, requests[0])
    gateway = Gateway(first, second, models=("tiny",))
    try:
        wait_until(lambda: is_serving(gateway))
        assert [created(gateway, request) for request in requests] == expected
    finally:
        gateway.stop()
    replicas.lose(by=second)
    assert [created(second, request) for request in requests] == expected
    assert len(clients(second).trainers()) == len(requests)


def created(server: RunningServer | Gateway, request: CreateTrainerRequest) -> str:
    with raw_channel(server.address) as channel:
        reply = unary_call(channel, "TrainerService/CreateTrainer", request.SerializeToString())
    return str(CreateTrainerResponse.FromString(reply).trainer.trainer_id)


def test_a_gateway_finds_it_again(replicas: Replicas, clients: Any, tmp_path: Path) -> None:
    first, second = replicas.start(), replicas.start()
    gateway = Gateway(first, second, models=("tiny",))
    try:
        wait_until(lambda: is_serving(gateway))
        with trocar.connect(gateway.address, retries=0, direct=False) as client:
            trainer = make_trainer(client)
            owner = first if first.app.trainers.all() else second
            other = second if owner is first else first
            trainer.step(*samples(4, 0))
            with ThreadPoolExecutor(1) as thread:
                gateway.serve(other)  # its owner is gone, and nobody has taken it over yet
                call = thread.submit(trainer.step, *samples(4, 1))
                replicas.lose(by=other)
                assert call.result(WAIT_S).update_count == 2
            gateway.serve(owner, other)  # the late one is back
            trainer.step(*samples(4, 2))
            assert_weights(trainer, plain_steps(3).model, tmp_path)
    finally:
        gateway.stop()


def test_predictions_wait_for_the_takeover_of_their_trainer(replicas: Replicas) -> None:
    first, second = replicas.start(), replicas.start()
    gateway = Gateway(first, second, models=("tiny",))
    try:
        wait_until(lambda: is_serving(gateway))
        with trocar.connect(gateway.address, retries=0, direct=False) as client:
            trainer = make_steps(client, 1)
            owner = first if first.app.trainers.all() else second
            other = second if owner is first else first
            inputs = samples(4, 9)[0]
            expected = trainer.predict(inputs)
            with ThreadPoolExecutor(1) as thread:
                gateway.serve(other)  # its owner is gone, and nobody has taken it over yet
                prediction = thread.submit(trainer.predict, inputs)
                assert wait((prediction,), timeout=1.0).not_done
                replicas.lose(by=other)
                assert np.array_equal(prediction.result(WAIT_S), expected)
            gateway.serve(owner, other)  # the late one is back, with old weights
            trainer.step(*samples(4, 1))
            assert not np.array_equal(trainer.predict(inputs), expected)
    finally:
        gateway.stop()
