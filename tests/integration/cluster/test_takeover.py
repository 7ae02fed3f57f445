"""Trainers of a lost replica, taken over by another one on shared storage: fences, results, continuation."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.support.oracles.tiny_training import (
    MODELS,
    PlainTrainer,
    assert_weights,
    fitted_plainly,
    make_trainer,
    samples,
)
from tests.support.servers.gateway import Gateway, is_serving
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.waiting import wait_until
from tests.support.wire.wire import raw_channel, unary_call
from trocar._wire.trainer_requests import TrainerOptions, trainer_spec
from trocar.errors import NonFiniteStepError, QuotaExceededError, TrainerBusyError, UnknownTrainerError
from trocar_api.repeats import REPEATED_KEY
from trocar_api.v1.trainer_pb2 import CreateTrainerRequest, CreateTrainerResponse, PublishTrainerRequest
from trocar_api.v1.trainer_pb2_grpc import TrainerServiceStub
from trocar_server.cluster.published_models import PublishedModels
from trocar_server.cluster.replica_server import take_slot
from trocar_server.training import trainer as trainer_module
from trocar_server.training.files.owner_folders import OwnerFolders
from trocar_server.training.fit import fitting as fitting_module

WAIT_S = 60.0


class Replicas:
    """Servers that share the folder of their trainers."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.root, self._folder, self._stack = folder / "trainers", folder, stack
        self._names: dict[RunningServer, str] = {}

    def start(self, **options: Any) -> RunningServer:
        name = f"replica-{len(self._names)}"
        settings: dict[str, Any] = {"models": MODELS, "device": "cpu", "data_dir": self._folder / "data"}
        settings |= options
        settings.setdefault("own_dir", self._folder / name)
        server = self._stack.enter_context(running_server(owners=OwnerFolders(self.root, name), **settings))
        self._names[server] = name
        return server

    def lose(self, *, by: RunningServer) -> None:
        """Let a server believe that it is the only one left."""
        takeover = by.app.takeover
        assert takeover is not None
        takeover._gone_after_s = 0.0  # the time is Ray's business
        takeover._servers = {self._names[by]: True}
        by.run(takeover.look)


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    with ExitStack() as stack:
        yield Replicas(tmp_path, stack)


@pytest.fixture
def clients() -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda server: stack.enter_context(trocar.connect(server.address, retries=0))


def make_steps(client: trocar.Client, count: int) -> trocar.Trainer:
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


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_publication_whose_answer_is_lost_with_its_replica_is_not_made_twice(
    replicas: Replicas, clients: Any, tmp_path: Path, has_ended: bool
) -> None:
    (lost_slot, lost_lock), (own_slot, own_lock) = (
        take_slot(tmp_path / "replicas" / "tiny") for _ in range(2)
    )
    first, second = replicas.start(own_dir=lost_slot), replicas.start(own_dir=own_slot)
    publishing = second.app.trainers.publishing
    publishing.others = PublishedModels(own_slot, MODELS, publishing)  # as `replica_server` does
    trainer = make_trainer(clients(first))
    trainer.step(*samples(4))
    trainer.publish("tuned")
    replicas.lose(by=second)
    if has_ended:
        lost_lock.release()
    request = PublishTrainerRequest(trainer_id=trainer.trainer_id, model_id="tuned")
    with raw_channel(second.address) as channel:
        TrainerServiceStub(channel).PublishTrainer(request, metadata=((REPEATED_KEY, "1"),), timeout=WAIT_S)
    found = [path.parent.parent.parent for path in tmp_path.glob("replicas/*/*/published/*/model.json")]
    assert found == [own_slot if has_ended else lost_slot]
    clients(second if has_ended else first).unpublish("tuned")
    assert list(tmp_path.glob("replicas/*/*/published/*/model.json")) == []
    for lock in (lost_lock, own_lock):
        lock.release()


def test_an_id_is_published_once_on_a_cluster(replicas: Replicas, clients: Any, tmp_path: Path) -> None:
    """Not by a replica of another model either, nor by two at once, nor one of the configuration."""
    folders = [tmp_path / "replicas" / name for name in ("tiny", "tiny", "other")]
    connected, locks = [], []
    for folder in folders:
        slot, lock = take_slot(folder)
        replica = replicas.start(own_dir=slot)
        publishing = replica.app.trainers.publishing
        publishing.others = PublishedModels(slot, [*MODELS, "configured"], publishing)
        connected.append(clients(replica))
        locks.append(lock)
    trainers = [make_trainer(client) for client in connected]

    def problem_of(trainer: trocar.Trainer, name: str = "tuned") -> str:
        try:
            trainer.publish(name)
        except trocar.errors.TrocarError as error:
            return str(error.reason)
        return ""

    with ThreadPoolExecutor(len(trainers)) as threads:
        problems = list(threads.map(problem_of, trainers))
    assert sorted(problems) == ["", "MODEL_CONFLICT", "MODEL_CONFLICT"]
    found = list(tmp_path.glob("replicas/*/*/published/*/model.json"))
    assert [path.parent.name for path in found] == ["tuned"]
    assert problem_of(trainers[0], "configured") == "MODEL_CONFLICT"
    connected[problems.index("")].unpublish("tuned")
    assert [problem_of(trainer) for trainer in trainers] == ["", "MODEL_CONFLICT", "MODEL_CONFLICT"]
    for lock in locks:
        lock.release()


def test_published_models_of_a_replica_that_has_ended_are_hosted_by_another(tmp_path: Path) -> None:
    """Not those of one that runs, nor one whose id is taken; each moves once."""
    slots, locks = [], []
    settings: dict[str, Any] = {"models": MODELS, "device": "cpu", "data_dir": tmp_path / "data"}
    for _ in range(2):
        slot, lock = take_slot(tmp_path / "replicas")
        slots.append(slot)
        locks.append(lock)
    inputs = samples(4, 0)[0]
    with running_server(own_dir=slots[1], **settings) as other, trocar.connect(other.address) as client:
        published = PublishedModels(slots[1], MODELS, other.app.trainers.publishing)
        own = make_trainer(client)
        own.publish("both")
        with running_server(own_dir=slots[0], **settings) as lost, trocar.connect(lost.address) as first:
            trainer = make_trainer(first)
            trainer.step(*samples(4, 1))
            for name in ("tuned", "both"):
                trainer.publish(name)
            expected = first.extract("tuned", inputs, "/out")["/out"]
            other.run(published.take_lost)
            assert "tuned" not in {model.model_id for model in client.models()}
        before = client.extract("both", inputs, "/out")["/out"]
        locks[0].release()
        for _ in range(2):
            other.run(published.take_lost)
        assert np.array_equal(client.extract("tuned", inputs, "/out")["/out"], expected)
        assert np.array_equal(client.extract("both", inputs, "/out")["/out"], before)
        assert not np.array_equal(before, expected)
        take_slot(tmp_path / "replicas")[1].release()  # nothing holds the lost one's
    with running_server(own_dir=slots[1], **settings) as again, trocar.connect(again.address) as client:
        assert np.array_equal(client.extract("tuned", inputs, "/out")["/out"], expected)
    locks[1].release()
