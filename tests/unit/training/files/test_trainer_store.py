"""Records of trainers."""

from pathlib import Path

import pytest

from tests.unit.training.stores import ID, OTHER_ID, SPEC, make_state, opened, tree, with_trainer
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.files.trainer_storage import TrainingStorage
from trocar_server.training.files.trainer_store import TrainerStore, UnreadableTrainer, check_base
from trocar_server.training.spec.trainer_spec import TrainerSpec

BAD_IDS = [
    "",
    "..",
    "../x",
    "a/b",
    ID[:-1],
    ID + "0",
    ID.upper(),
    ID[:-1] + "\n",
    ID + "\n",
    "~" + ID[1:],
    "lock",
]


@pytest.fixture
def store(tmp_path: Path) -> TrainerStore:
    times = iter(range(100, 200))
    return TrainerStore(tmp_path / "data" / "trainers", lambda: next(times))


def reason(error: pytest.ExceptionInfo[ServiceError]) -> ErrorReason:
    return error.value.reason


def test_a_trainer_is_there_after_a_restart(tmp_path: Path, store: TrainerStore) -> None:
    spec = TrainerSpec(model_id="resnet18", ema_decay=0.9, trainable=("fc", "layer4"))
    made = store.create(ID, "alice", spec.model_dump(mode="json"), "resnet18", "ab" * 32, {"fit": None})
    (found,) = TrainerStore(tmp_path / "data" / "trainers").entries()
    assert found == made == store.get(ID)
    assert TrainerSpec.model_validate(found.spec) == spec
    assert (found.principal, found.base_model_id, found.base_sha256) == ("alice", "resnet18", "ab" * 32)
    assert (found.created_at_s, found.facts) == (100, {"fit": None})


def test_trainers_are_listed_from_the_oldest(store: TrainerStore) -> None:
    store.create(OTHER_ID, "bob", SPEC, "m", "")
    store.create(ID, "alice", SPEC, "m", "")
    assert [record.trainer_id for record in store.entries()] == [OTHER_ID, ID]


def test_no_folder_is_no_trainer(store: TrainerStore) -> None:
    assert store.entries() == []


def test_facts_are_replaced_and_the_rest_stays(tmp_path: Path, store: TrainerStore) -> None:
    made = store.create(ID, "alice", SPEC, "m", "x", {"old": 1})
    store.update(ID, {"fit": {"epochs": 3, "losses": [float("inf")]}})
    found = TrainerStore(tmp_path / "data" / "trainers").get(ID)
    assert found == made.model_copy(update={"facts": {"fit": {"epochs": 3, "losses": [float("inf")]}}})


def test_an_id_is_not_given_twice(store: TrainerStore) -> None:
    made = store.create(ID, "alice", SPEC, "m", "x")
    with pytest.raises(ServiceError):
        store.create(ID, "bob", SPEC, "m", "y")
    assert store.get(ID) == made


@pytest.mark.parametrize("trainer_id", BAD_IDS)
def test_what_is_no_id_is_unknown_and_makes_no_path(
    tmp_path: Path, store: TrainerStore, trainer_id: str
) -> None:
    store.create(OTHER_ID, "bob", SPEC, "m", "")
    for call in (store.get, store.delete, store.folder_of, lambda x: store.update(x, {})):
        with pytest.raises(ServiceError) as error:
            call(trainer_id)
        assert reason(error) is ErrorReason.UNKNOWN_TRAINER
    with pytest.raises(ServiceError):
        store.create(trainer_id, "eve", SPEC, "m", "")
    assert tree(tmp_path / "data") == [f"trainers/{OTHER_ID}/trainer.json"]


def test_an_absent_trainer_is_unknown(store: TrainerStore) -> None:
    with pytest.raises(ServiceError) as error:
        store.get(ID)
    assert reason(error) is ErrorReason.UNKNOWN_TRAINER


def test_a_deleted_trainer_leaves_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as storage:
        with_trainer(storage)
        with_trainer(storage, OTHER_ID)
        storage.checkpoints.save(ID, make_state())
        storage.trainers.delete(ID)
        assert [record.trainer_id for record in storage.trainers.entries()] == [OTHER_ID]
        assert tree(tmp_path) == [f"trainers/{OTHER_ID}/trainer.json"]
        for call in (storage.trainers.delete, storage.checkpoints.load, storage.checkpoints.entries):
            with pytest.raises(ServiceError) as error:
                call(ID)
            assert reason(error) is ErrorReason.UNKNOWN_TRAINER


def test_what_lies_beside_the_files_of_ours_is_not_deleted(tmp_path: Path, store: TrainerStore) -> None:
    store.create(ID, "alice", SPEC, "m", "")
    folder = store.folder_of(ID)
    (folder / "notes.txt").write_text("mine")
    store.delete(ID)
    assert store.entries() == []
    assert [path.read_text() for path in (tmp_path / "data").rglob("notes.txt")] == ["mine"]


@pytest.mark.parametrize("damage", ["gone", "cut", "bit", "swapped"])
def test_a_damaged_trainer_is_told_and_hides_no_other(store: TrainerStore, damage: str) -> None:
    store.create(ID, "alice", SPEC, "m", "")
    store.create(OTHER_ID, "bob", SPEC, "m", "")
    path = store.folder_of(ID) / "trainer.json"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    other = (store.folder_of(OTHER_ID) / "trainer.json").read_bytes()
    contents = {"gone": b"", "cut": bytes(content[:50]), "bit": bytes(content), "swapped": other}
    path.write_bytes(contents[damage])
    assert [record.trainer_id for record in store.entries()] == [OTHER_ID]
    with pytest.raises(ServiceError) as error:
        store.get(ID)
    assert reason(error) is ErrorReason.TRAINER_BROKEN
    found = store.look_at(ID)
    assert isinstance(found, UnreadableTrainer)
    assert (found.trainer_id, found.error.reason) == (ID, ErrorReason.CHECKPOINT_CORRUPT)
    store.delete(ID)
    assert store.look_at(ID) is None


def test_another_base_is_refused(store: TrainerStore) -> None:
    record = store.create(ID, "alice", SPEC, "resnet18", "ab" * 32)
    check_base(record, "ab" * 32)
    with pytest.raises(ServiceError, match="weights of model 'resnet18' are not those") as error:
        check_base(record, "cd" * 32)
    assert reason(error) is ErrorReason.MODEL_CONFLICT


def test_only_their_owner_may_read_trainers(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as storage:
        with_trainer(storage)
        storage.checkpoints.save(ID, make_state())
    for path in (tmp_path / "data").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_locks_do_not_pile_up(tmp_path: Path) -> None:
    storage = TrainingStorage(tmp_path, keep=1)
    for number in range(20):
        with_trainer(storage, f"{number:032x}")
        storage.trainers.delete(f"{number:032x}")
    assert storage.trainers._locks == {}
    storage.close()
