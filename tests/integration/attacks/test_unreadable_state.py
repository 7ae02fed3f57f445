"""State on disk that cannot be read is told with the reason: never listed as closed, never absent."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.oracles.oracle import noise
from tests.support.servers.damages import DAMAGES, deny, deny_writing
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from trocar._cli import main
from trocar_api.v1 import trainer_pb2

PLAIN = {"plain": custom(Plain, (3, 8, 8))}
BATCH = noise(2, 3, 8, 8), np.array([0, 1])


@dataclass(frozen=True)
class Kept:
    """A data directory with something of each kind in it."""

    folder: Path
    trainer_id: str
    dataset_id: str

    def path(self, kind: str) -> Path:
        (found,) = self.folder.glob(PATTERNS[kind].format(self.trainer_id))
        return found


PATTERNS = {
    "trainer": "trainers/{}/trainer.json",
    "newest manifest": "trainers/{}/checkpoint-00000002.json",
    "newest tensors": "trainers/{}/checkpoint-00000002.safetensors",
    "published model": "published/tuned/model.json",
    "published weights": "published/tuned/weights-*.safetensors",
    "data set": "datasets/owners/*/*.dataset",
    "stored edits": "edits/*/*.edits",
}


@contextmanager
def served(folder: Path, **settings: Any) -> Iterator[tuple[trocar.Client, RunningServer]]:
    settings = {"models": PLAIN, "device": "cpu", "data_dir": folder, **settings}
    with capture_logs(), running_server(**settings) as server, trocar.connect(server.address) as client:
        client.wait_ready()
        yield client, server


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("original") / "data"
    with served(folder) as (client, _):
        trainer = client.train("plain")
        for _ in range(2):
            trainer.step(*BATCH)
            trainer.save()
        trainer.publish("tuned")
        dataset = client.upload_dataset((noise(4, 3, 8, 8), np.arange(4)))
        client.store_edits("plain", "none", [trocar.edit("fc", "zero")])
        return Kept(folder, trainer.trainer_id, dataset.dataset_id)


@pytest.fixture
def kept(original: Kept, tmp_path: Path) -> Kept:
    shutil.copytree(original.folder, tmp_path / "data")
    return Kept(tmp_path / "data", original.trainer_id, original.dataset_id)


@pytest.fixture(params=[*DAMAGES, "unreadable"])
def damage(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def do(damage: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deny(monkeypatch, path) if damage == "unreadable" else DAMAGES[damage](path)


def reason_of(damage: str) -> str:
    return "STORAGE_UNAVAILABLE" if damage == "unreadable" else "CHECKPOINT_CORRUPT"


def test_what_is_whole_is_told_as_before(kept: Kept) -> None:
    with served(kept.folder) as (client, _):
        (info,) = client.trainers()
        assert (info.trainer_id, info.state, info.update_count) == (kept.trainer_id, "ready", 2)
        assert (info.problem, info.skipped_checkpoints, info.notices) == ("", (), ())
        assert {model.model_id: model.state for model in client.models()} == {
            "plain": "loaded",
            "tuned": "loaded",
        }
        assert [(d.dataset_id, d.problem) for d in client.datasets()] == [(kept.dataset_id, "")]
        assert [(e.name, e.problem) for e in client.stored_edits()] == [("none", "")]


def test_a_trainer_whose_description_is_damaged_is_listed_with_the_reason(
    kept: Kept, damage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    do(damage, kept.path("trainer"), monkeypatch)
    with served(kept.folder) as (client, server):
        (info,) = client.trainers()
        assert (info.trainer_id, info.state, info.problem_reason) == (
            kept.trainer_id,
            "unreadable",
            reason_of(damage),
        )
        with pytest.raises(trocar.TrocarError) as caught:
            client.trainer(kept.trainer_id)
        assert (caught.value.reason, str(caught.value)) == (info.problem_reason, info.problem)
        with trocar.connect(server.address, token="another's") as other:
            assert other.trainers() == []
            with pytest.raises(trocar.errors.UnknownTrainerError):
                other.trainer(kept.trainer_id)
        with pytest.raises(SystemExit):
            main(["trainers", "list", "--server", server.address])
    assert info.problem_reason in capsys.readouterr().out


def test_a_checkpoint_that_is_damaged_is_told_with_the_fall_back(
    kept: Kept, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("newest manifest", "newest tensors"):
        with monkeypatch.context() as patch:
            copy = kept.folder.with_name(kind.replace(" ", "-"))
            shutil.copytree(kept.folder, copy)
            own = Kept(copy, kept.trainer_id, kept.dataset_id)
            do(damage, own.path(kind), patch)
            with served(copy) as (client, _):
                (info,) = client.trainers()
                if damage == "unreadable":  # it may be there again soon: nothing older takes its place
                    assert (info.state, info.problem_reason) == ("unreadable", "STORAGE_UNAVAILABLE")
                    continue
                assert (info.state, info.checkpoint_number, info.update_count) == ("ready", 1, 1)
                assert "checkpoint 2" in info.notices[0]
                if damage == "delete" and kind == "newest manifest":  # as a save that was cut off looks
                    assert "no manifest" in info.notices[0]
                    continue
                assert info.skipped_checkpoints == (2,)
                with pytest.warns(RuntimeWarning, match="checkpoint 2 is damaged"):
                    trainer = client.trainer(kept.trainer_id)
                listed = {saved.number: bool(saved.problem) for saved in trainer.checkpoints()}
                assert listed[1] is False
                assert listed.get(2, False) is (damage in ("cut", "delete") or kind == "newest manifest")
                trainer.step(*BATCH)
                trainer.save()
                assert (trainer.info().skipped_checkpoints, trainer.info().notices) == ((), ())


def test_without_a_readable_checkpoint_a_trainer_is_not_begun_anew(kept: Kept) -> None:
    for path in kept.folder.glob("trainers/*/checkpoint-*.json"):
        DAMAGES["flip"](path)
    with served(kept.folder) as (client, _):
        (info,) = client.trainers()
        assert (info.state, info.problem_reason, info.model_id) == (
            "unreadable",
            "CHECKPOINT_CORRUPT",
            "plain",
        )
        with pytest.raises(trocar.errors.CheckpointCorruptError):
            client.trainer(kept.trainer_id)
    assert kept.path("newest tensors").exists()  # its owner may want it


def test_a_trainer_whose_model_is_not_configured_says_which_and_comes_back_with_it(kept: Kept) -> None:
    with served(kept.folder, models={"other": custom(Plain, (3, 8, 8))}) as (client, _):
        (info,) = client.trainers()
        assert (info.state, info.problem_reason) == ("unreadable", "UNKNOWN_MODEL")
        assert "'plain'" in info.problem
        with pytest.raises(trocar.errors.UnknownModelError, match="'plain'"):
            client.trainer(kept.trainer_id)
    with served(kept.folder) as (client, _):
        assert client.trainer(kept.trainer_id).info().update_count == 2


def test_an_unreadable_trainer_comes_back_when_its_file_can_be_read_again(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        deny(patch, kept.path("newest tensors"))
        with served(kept.folder) as (client, _):
            assert client.trainers()[0].state == "unreadable"
            patch.undo()
            assert client.trainer(kept.trainer_id).info().update_count == 2
            assert [info.state for info in client.trainers()] == ["ready"]


def test_an_unreadable_trainer_can_be_closed(kept: Kept) -> None:
    DAMAGES["zero"](kept.path("trainer"))
    with served(kept.folder) as (client, server):
        connection = client._connection
        request = trainer_pb2.CloseTrainerRequest(trainer_id=kept.trainer_id)
        connection.call(connection.trainer_service.CloseTrainer, request)
        assert client.trainers() == []
        assert server.run(server.app.trainers.stored_ids) == set()


@pytest.mark.parametrize("is_read_only", [True, False])
def test_a_folder_of_trainers_that_cannot_be_used_is_no_empty_one(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, *, is_read_only: bool
) -> None:
    with monkeypatch.context() as patch:
        refuse = deny_writing if is_read_only else deny
        refuse(patch, kept.folder / "trainers")
        with served(kept.folder) as (client, _):
            for call in (
                client.trainers,
                lambda: client.trainer(kept.trainer_id),
                lambda: client.train("plain"),
            ):
                with pytest.raises(trocar.errors.StorageUnavailableError, match=r"Read-only|Permission"):
                    call()
            assert client.model("tuned").is_loaded  # to read it takes no lock
            patch.undo()
            assert [info.update_count for info in client.trainers()] == [2]


@pytest.mark.parametrize("kind", ["published model", "published weights"])
def test_a_published_model_that_cannot_be_read_is_listed_as_failed(
    kept: Kept, damage: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (kind, damage) == ("published model", "delete"):
        return  # that is how a model is removed
    do(damage, kept.path(kind), monkeypatch)
    with served(kept.folder) as (client, _):
        model = client.model("tuned")
        assert model.state == "failed"
        assert model.error_message
        with pytest.raises(trocar.errors.ModelNotLoadedError) as caught:
            client.extract("tuned", BATCH[0], "fc")
        assert model.error_message in str(caught.value)
        with pytest.raises(trocar.TrocarError):
            client.load("tuned")
        assert client.model("tuned").state == "failed"
        with pytest.raises(trocar.errors.ModelConflictError):
            client.trainer(kept.trainer_id).publish("tuned")


def test_a_data_set_that_cannot_be_read_is_listed_with_the_reason(
    kept: Kept, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if damage == "delete":
        return  # that is how a data set is deleted
    do(damage, kept.path("data set"), monkeypatch)
    with served(kept.folder) as (client, _):
        (dataset,) = client.datasets()
        assert dataset.dataset_id == kept.dataset_id
        assert dataset.problem
        with pytest.raises(trocar.TrocarError):
            client.dataset(kept.dataset_id)


def test_stored_edits_that_cannot_be_read_are_listed_with_the_reason(
    kept: Kept, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if damage == "delete":
        return  # that is how edits are deleted
    do(damage, kept.path("stored edits"), monkeypatch)
    with served(kept.folder) as (client, _):
        (stored,) = client.stored_edits()
        assert stored.problem
        assert stored.name in ("none", "")
        with pytest.raises(trocar.TrocarError) as caught:
            client.extract("plain", BATCH[0], "fc", edits="none")
        assert caught.value.reason in ("EDITS_CORRUPT", "EDITS_UNAVAILABLE")


def test_a_first_start_says_nothing_of_the_servers_id(tmp_path: Path) -> None:
    lock = tmp_path / "new" / "trainers" / "lock"  # which a server that is alone takes first
    lock.parent.mkdir(parents=True)
    lock.touch()
    with served(tmp_path / "new") as (client, _):
        (feature,) = (f for f in client.server_info().features if f.name == "server_id")
        assert (feature.is_on, feature.reason) == (True, "")


def test_a_server_id_that_is_damaged_is_said_and_one_out_of_reach_is_kept(
    kept: Kept, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept.folder / "server.id"
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        do(damage, path, patch)
        with served(kept.folder) as (client, _):
            info = client.server_info()
            (feature,) = (f for f in info.features if f.name == "server_id")
            assert feature.is_on is False
            assert feature.reason
    if damage == "unreadable":
        assert path.read_bytes() == before
