"""Published models of replicas that share a folder: an id is published once, and none is lost."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import trocar
from tests.support.oracles.tiny_training import (
    MODELS,
    make_trainer,
    samples,
)
from tests.support.servers.replicas import Replicas
from tests.support.servers.running_server import running_server
from tests.support.wire.wire import raw_channel
from trocar_api.reasons import ErrorReason
from trocar_api.repeats import REPEATED_KEY
from trocar_api.v1.trainer_pb2 import PublishTrainerRequest
from trocar_api.v1.trainer_pb2_grpc import TrainerServiceStub
from trocar_server.cluster.published_models import PublishedModels
from trocar_server.cluster.replica_server import take_slot
from trocar_server.errors import ServiceError

WAIT_S = 60.0


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_publication_whose_answer_is_lost_with_its_replica_is_not_made_twice(
    replicas: Replicas, clients: Any, tmp_path: Path, has_ended: bool
) -> None:
    (lost_slot, lost_lock), (own_slot, own_lock) = (
        take_slot(tmp_path / "replicas" / "tiny") for _ in range(2)
    )
    published = PublishedModels(own_slot, MODELS)  # as `replica_server` does
    first = replicas.start(own_dir=lost_slot)
    second = replicas.start(own_dir=own_slot, published=published)
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
        replica = replicas.start(own_dir=slot, published=PublishedModels(slot, [*MODELS, "configured"]))
        connected.append(clients(replica))
        locks.append(lock)
    trainers = [make_trainer(client) for client in connected]

    def problem_of(trainer: trocar.training.Trainer, name: str = "tuned") -> str:
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


def test_an_id_whose_model_could_not_be_hosted_is_free_on_a_cluster(
    replicas: Replicas, clients: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers, locks = [], []
    for name in ("tiny", "other"):
        slot, lock = take_slot(tmp_path / "replicas" / name)
        replica = replicas.start(own_dir=slot, published=PublishedModels(slot, MODELS))
        trainers.append(make_trainer(clients(replica)))
        locks.append(lock)
    failure = ServiceError(ErrorReason.OUT_OF_MEMORY, "the device is full")
    with monkeypatch.context() as patch:
        patch.setattr("trocar_server.engine.host.deployments.load_model", Mock(side_effect=failure))
        with pytest.raises(trocar.errors.ServerOutOfMemoryError):
            trainers[0].publish("tuned")
    assert trainers[1].publish("tuned") == "tuned"
    found = list(tmp_path.glob("replicas/*/*/published/*/model.json"))
    assert [path.relative_to(tmp_path / "replicas").parts[0] for path in found] == ["other"]
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
    published = PublishedModels(slots[1], MODELS)
    with (
        running_server(own_dir=slots[1], published=published, **settings) as other,
        trocar.connect(other.address) as client,
    ):
        take_lost = other.app.trainers.publishing.take_lost
        own = make_trainer(client)
        own.publish("both")
        with running_server(own_dir=slots[0], **settings) as lost, trocar.connect(lost.address) as first:
            trainer = make_trainer(first)
            trainer.step(*samples(4, 1))
            for name in ("tuned", "both"):
                trainer.publish(name)
            expected = first.extract("tuned", inputs, "/out")["/out"]
            other.run(take_lost)
            assert "tuned" not in {model.model_id for model in client.models()}
        before = client.extract("both", inputs, "/out")["/out"]
        locks[0].release()
        for _ in range(2):
            other.run(take_lost)
        assert np.array_equal(client.extract("tuned", inputs, "/out")["/out"], expected)
        assert np.array_equal(client.extract("both", inputs, "/out")["/out"], before)
        assert not np.array_equal(before, expected)
        take_slot(tmp_path / "replicas")[1].release()  # nothing holds the lost one's
    with running_server(own_dir=slots[1], **settings) as again, trocar.connect(again.address) as client:
        assert np.array_equal(client.extract("tuned", inputs, "/out")["/out"], expected)
    locks[1].release()
