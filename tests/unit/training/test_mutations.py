"""Files that were changed: never taken for what was written, and never another error than ours.

More of them with TROCAR_STORE_MUTATIONS=300000; the draws are seeded.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.files.scale import count
from tests.unit.training.stores import ID, assert_same_state, make_state, opened, replace_fc, with_trainer
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import ModelSpec, load_model
from trocar_server.storage.sealed_record import seal
from trocar_server.training.files.checkpoint_files import KIND
from trocar_server.training.files.snapshots import snapshot_state_dict
from trocar_server.training.files.trainer_storage import TrainingStorage

COUNT = count(300, "TROCAR_STORE_MUTATIONS")
BASE = ModelSpec("net", "tests.unit.models.factories:Net", "random:1", arguments=(6,), input_shape=(3, 8, 8))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingStorage]:
    with opened(tmp_path_factory.mktemp("data")) as storage:
        with_trainer(storage)
        storage.checkpoints.save(ID, make_state(1, size=9), attached={"fit": {"epoch": 1}})
        storage.checkpoints.save(ID, make_state(2, size=9), attached={"fit": {"epoch": 2}})
        base = load_model(BASE, CPU, Path("unused"))
        storage.published.publish("flowers", "alice", base, snapshot_state_dict(base.module))
        yield storage


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Change bits, cut, repeat, swap or fill; sometimes several times."""
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        at = chance.randrange(len(changed) + 1)
        span = chance.choice([1, 2, 8, 64, len(changed) // 2 + 1])
        kind = chance.randrange(7)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            del changed[at : at + span]
        elif kind == 3:
            changed[at:at] = changed[at : at + span]
        elif kind == 4:
            changed[at : at + span] = bytes(len(changed[at : at + span]))
        elif kind == 5:
            changed[at:at] = chance.randbytes(span)
        else:
            other = chance.randrange(len(changed) + 1)
            changed[at : at + span], changed[other : other + span] = (
                changed[other : other + span],
                changed[at : at + span],
            )
    return bytes(changed)


def accepted_wrongly(
    path: Path, read: Callable[[], object], is_same: Callable[[object], bool]
) -> list[bytes]:
    """Read a file in many mutations and return those that were taken for something else than what it was."""
    original, wrong = path.read_bytes(), []
    chance = random.Random(path.name)
    try:
        for _ in range(COUNT):
            content = mutated(original, chance)
            path.write_bytes(content)
            try:
                found = read()
            except ServiceError:
                continue
            if content != original and not is_same(found):
                wrong.append(content)
    finally:
        path.write_bytes(original)
    return wrong


@pytest.mark.parametrize("end", [".safetensors", ".json"])
def test_a_changed_checkpoint_is_never_taken_for_one(storage: TrainingStorage, end: str) -> None:
    path = storage.trainers.folder_of(ID) / f"checkpoint-00000002{end}"
    refused = []

    def read() -> object:
        try:
            return storage.checkpoints.load(ID)
        except ServiceError as error:
            refused.append(error.reason)
            raise

    assert accepted_wrongly(path, read, lambda found: False) == []
    assert set(refused) == {"CHECKPOINT_CORRUPT"}
    assert len(refused) > COUNT // 2


def test_the_checkpoint_before_a_changed_one_is_always_offered(storage: TrainingStorage) -> None:
    path = storage.trainers.folder_of(ID) / "checkpoint-00000002.safetensors"

    def is_first(found: object) -> bool:
        assert found is not None
        state = storage.checkpoints.load_newest(ID)
        assert state is not None
        assert_same_state(state.state, make_state(1, size=9))
        return state.attached == {"fit": {"epoch": 1}} and state.skipped == (2,)

    assert accepted_wrongly(path, lambda: storage.checkpoints.load_newest(ID), is_first) == []


def test_a_sealed_manifest_that_lies_is_an_error_of_ours(storage: TrainingStorage) -> None:
    """Whoever can write the seal can write all; but nothing else than an error of ours may come of it."""
    path = storage.trainers.folder_of(ID) / "checkpoint-00000002.json"
    original = path.read_bytes()
    body = original.partition(b"\n")[2]
    chance = random.Random(0)
    try:
        for _ in range(COUNT):
            changed = mutated(body, chance)
            path.write_bytes(seal(KIND, changed))
            for call in (
                storage.checkpoints.load,
                storage.checkpoints.entries,
                storage.checkpoints.load_newest,
            ):
                try:
                    call(ID)
                except ServiceError:
                    continue
    finally:
        path.write_bytes(original)


def test_a_sealed_file_of_tensors_that_lies_is_an_error_of_ours(storage: TrainingStorage) -> None:
    """The same, with a manifest that knows the sha256 of the changed tensors."""
    store, folder = storage.checkpoints, storage.trainers.folder_of(ID)
    path, manifest = (folder / f"checkpoint-00000002{end}" for end in (".safetensors", ".json"))
    original, sealed = path.read_bytes(), manifest.read_bytes()
    described = store.load(ID).checkpoint
    chance = random.Random(0)
    try:
        for _ in range(COUNT):
            changed = mutated(original, chance)
            path.write_bytes(changed)
            body = sealed.partition(b"\n")[2]
            body = body.replace(described.sha256.encode(), hashlib.sha256(changed).hexdigest().encode())
            body = body.replace(b'"byte_count": %d' % len(original), b'"byte_count": %d' % len(changed))
            manifest.write_bytes(seal(KIND, body))
            try:
                store.load(ID)
            except ServiceError:
                continue
    finally:
        path.write_bytes(original)
        manifest.write_bytes(sealed)


def test_a_changed_trainer_is_never_taken_for_one(storage: TrainingStorage) -> None:
    path = storage.trainers.folder_of(ID) / "trainer.json"

    def read() -> object:
        assert storage.trainers.entries() == [] or path.read_bytes() == original
        return storage.trainers.get(ID)

    original = path.read_bytes()
    assert accepted_wrongly(path, read, lambda found: False) == []


@pytest.mark.parametrize("name", ["model.json", "weights"])
def test_a_changed_published_model_is_never_hosted(
    tmp_path: Path, storage: TrainingStorage, name: str
) -> None:
    store = storage.published
    (model,) = store.entries()
    folder = Path(store.model_spec(model, replace_fc).weights).parent
    path = folder / (name if name == "model.json" else model.weights_file)

    def host() -> object:
        for entry in store.entries():
            return load_model(store.model_spec(entry, replace_fc), CPU, tmp_path)
        raise ServiceError(ErrorReason.UNKNOWN_MODEL, "its record is damaged")

    assert accepted_wrongly(path, host, lambda found: False) == []
