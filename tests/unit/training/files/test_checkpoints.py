"""Checkpoints: bit-equal, numbered, limited, and told when they are damaged."""

import os
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.unit.training.stores import (
    DTYPES,
    ID,
    OTHER_ID,
    assert_same_state,
    assert_same_tensors,
    make_state,
    opened,
    random_tensor,
    tree,
    with_trainer,
)
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.files.checkpoints import CheckpointStore
from trocar_server.training.files.snapshots import snapshot
from trocar_server.training.files.trainer_storage import TrainingStorage
from trocar_server.training.step.trainer_state import Json, TrainerState


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[TrainingStorage]:
    with opened(tmp_path / "data") as storage:
        with_trainer(storage)
        yield storage


@pytest.fixture
def store(storage: TrainingStorage) -> CheckpointStore:
    return storage.checkpoints


@pytest.fixture
def folder(tmp_path: Path, storage: TrainingStorage) -> Path:
    return tmp_path / "data" / "trainers" / ID


def refused(reason: ErrorReason, store: CheckpointStore, number: int | None = None) -> ServiceError:
    with pytest.raises(ServiceError) as error:
        store.load(ID, number)
    assert error.value.reason is reason
    return error.value


def test_a_checkpoint_comes_back_bit_by_bit(store: CheckpointStore) -> None:
    state = make_state(5)
    saved = store.save(ID, snapshot(state), update_count=12, note="good", attached={"fit": {"epoch": 2}})
    found = store.load(ID)
    assert found.checkpoint == saved
    assert (saved.number, saved.update_count, saved.note, saved.is_automatic) == (1, 12, "good", False)
    assert found.attached == {"fit": {"epoch": 2}}
    assert_same_state(found.state, state)


def test_every_dtype_comes_back(store: CheckpointStore) -> None:
    tensors = {
        f"{dtype}{shape}": random_tensor(shape, dtype) for dtype in DTYPES for shape in [(), (0,), (3, 5)]
    }
    store.save(ID, TrainerState(tensors, {}))
    assert_same_tensors(store.load(ID).state.tensors, tensors)


def test_a_trainer_without_anything_can_be_saved(store: CheckpointStore) -> None:
    store.save(ID, TrainerState({}, {}))
    found = store.load(ID).state
    assert (found.tensors, found.facts) == ({}, {})


def test_tied_tensors_are_stored_once_and_are_one_again(store: CheckpointStore, folder: Path) -> None:
    weight = torch.arange(1000.0)
    saved = store.save(ID, snapshot(TrainerState({"a": weight, "b": weight, "c": weight[:500]}, {})))
    assert saved.byte_count < 1.6 * weight.nbytes
    found = store.load(ID).state.tensors
    assert found["a"] is found["b"]
    assert torch.equal(found["c"], weight[:500])


def test_states_that_were_no_snapshot_are_written_as_they_look(store: CheckpointStore) -> None:
    state = make_state(1)
    store.save(ID, state)
    assert_same_state(store.load(ID).state, state)


def test_a_training_run_goes_on_as_if_it_had_not_been_saved(store: CheckpointStore) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(8, 4)

    def make() -> tuple[nn.Linear, torch.optim.Adam]:
        torch.manual_seed(1)
        module = nn.Linear(4, 3)
        return module, torch.optim.Adam(module.parameters(), lr=0.1)

    def step(module: nn.Linear, optimizer: torch.optim.Adam) -> None:
        optimizer.zero_grad()
        module(inputs).square().sum().backward()
        optimizer.step()

    unbroken = make()
    for _ in range(6):
        step(*unbroken)

    first, adam = make()
    for _ in range(3):
        step(first, adam)
    moments = {f"{i}.{k}": v for i, entry in adam.state_dict()["state"].items() for k, v in entry.items()}
    store.save(ID, snapshot(TrainerState({**first.state_dict(), **moments}, {})))

    tensors = store.load(ID).state.tensors
    second, adam = make()
    second.load_state_dict({name: tensors[name] for name in ("weight", "bias")})
    described = adam.state_dict()
    names = ("step", "exp_avg", "exp_avg_sq")
    described["state"] = {i: {name: tensors[f"{i}.{name}"] for name in names} for i in (0, 1)}
    adam.load_state_dict(described)
    for _ in range(3):
        step(second, adam)
    assert_same_tensors(dict(second.state_dict()), dict(unbroken[0].state_dict()))


def test_the_tensors_open_with_safetensors(store: CheckpointStore, folder: Path) -> None:
    store.save(ID, snapshot(make_state()))
    found = load_file(folder / "checkpoint-00000001.safetensors")
    assert set(found) == set(make_state().tensors) - {"tied"}


def test_checkpoints_are_numbered_and_each_can_be_loaded(store: CheckpointStore) -> None:
    for seed in (1, 2, 3):
        assert store.save(ID, make_state(seed)).number == seed
    for seed in (2, 1, 3):
        assert_same_state(store.load(ID, seed).state, make_state(seed))
    assert store.load(ID).checkpoint.number == 3
    assert [checkpoint.number for checkpoint in store.entries(ID)] == [1, 2, 3]


def test_the_oldest_make_way_when_the_newest_is_there(store: CheckpointStore, folder: Path) -> None:
    for seed in range(1, 6):
        store.save(ID, make_state(seed))
    assert [checkpoint.number for checkpoint in store.entries(ID)] == [3, 4, 5]
    assert len(list(folder.iterdir())) == 7
    refused(ErrorReason.UNKNOWN_CHECKPOINT, store, 2)


def test_a_fits_own_checkpoints_do_not_push_out_what_was_asked_for(store: CheckpointStore) -> None:
    store.save(ID, make_state(1))
    for seed in range(2, 8):
        store.save(ID, make_state(seed), is_automatic=True)
    assert [(one.number, one.is_automatic) for one in store.entries(ID)] == [(1, False), (6, True), (7, True)]


def test_a_number_is_never_used_twice(tmp_path: Path, storage: TrainingStorage) -> None:
    store = storage.checkpoints
    store.save(ID, make_state())
    store.save(ID, make_state())
    store.delete(ID, 2)
    store.delete(ID, 1)
    storage.close()
    with opened(tmp_path / "data") as again:
        assert again.checkpoints.entries(ID) == []
        assert again.checkpoints.save(ID, make_state()).number == 3


def test_trainers_do_not_see_each_others(storage: TrainingStorage) -> None:
    with_trainer(storage, OTHER_ID)
    storage.checkpoints.save(ID, make_state(1))
    assert storage.checkpoints.entries(OTHER_ID) == []
    assert storage.checkpoints.load_newest(OTHER_ID) is None


@pytest.mark.parametrize("number", [0, 2, -1, 10**30, None])
def test_what_is_not_there_is_unknown(store: CheckpointStore, number: int | None) -> None:
    if number is not None:
        store.save(ID, make_state())
    refused(ErrorReason.UNKNOWN_CHECKPOINT, store, number)
    with pytest.raises(ServiceError) as error:
        store.delete(ID, number or 0)
    assert error.value.reason is ErrorReason.UNKNOWN_CHECKPOINT


def damage(folder: Path, number: int, kind: str) -> None:
    data, manifest = (folder / f"checkpoint-{number:08}{end}" for end in (".safetensors", ".json"))
    content = bytearray(data.read_bytes())
    if kind == "cut":
        data.write_bytes(content[:-1])
    elif kind == "bit":
        content[-1] ^= 1
        data.write_bytes(content)
    elif kind == "gone":
        data.unlink()
    elif kind == "link":
        data.rename(folder / "elsewhere")
        data.symlink_to(folder / "elsewhere")
    elif kind == "another's":
        before = f"checkpoint-{number - 1:08}"
        shutil.copy(folder / f"{before}.json", manifest)
        shutil.copy(folder / f"{before}.safetensors", data)
    else:
        manifest.write_bytes(manifest.read_bytes().replace(b'"number"', b'"numbex"'))


DAMAGES = ["cut", "bit", "gone", "link", "another's", "manifest"]


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_told_with_the_one_before(
    store: CheckpointStore, folder: Path, kind: str
) -> None:
    for seed in (1, 2, 3):
        store.save(ID, make_state(seed))
    damage(folder, 3, kind)
    error = refused(ErrorReason.CHECKPOINT_CORRUPT, store)
    assert "restore checkpoint 2 instead" in error.message
    assert error.details["previous"] == "2"
    assert str(folder) not in error.message
    assert_same_state(store.load(ID, 2).state, make_state(2))


SEEN = {
    "cut": r"its tensors have [\d,]+ bytes, expected [\d,]+",
    "bit": None,  # seen only by reading all of it
    "gone": "its tensor file is missing",
    "link": None,
    "another's": "its manifest is damaged: it belongs to another checkpoint",
    "manifest": "its manifest is damaged: .+",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_listed_with_its_reason(store: CheckpointStore, folder: Path, kind: str) -> None:
    for seed in (1, 2, 3):
        store.save(ID, make_state(seed))
    assert store.damaged(ID) == []
    damage(folder, 2, kind)
    listed, pattern = store.damaged(ID), SEEN[kind]
    assert [number for number, _ in listed] == ([] if pattern is None else [2])
    assert all(re.fullmatch(pattern or "", why) for _, why in listed), listed


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_restart_takes_the_newest_that_is_whole(store: CheckpointStore, folder: Path, kind: str) -> None:
    for seed in (1, 2, 3):
        store.save(ID, make_state(seed))
    damage(folder, 3, kind)
    damage(folder, 2, "bit")
    found = store.load_newest(ID)
    assert found is not None
    assert (found.checkpoint.number, found.skipped) == (1, (3, 2))
    assert_same_state(found.state, make_state(1))


def test_a_restart_says_when_all_are_damaged(store: CheckpointStore, folder: Path) -> None:
    store.save(ID, make_state())
    damage(folder, 1, "bit")
    with pytest.raises(ServiceError, match="no earlier checkpoint") as error:
        store.load_newest(ID)
    assert error.value.reason is ErrorReason.CHECKPOINT_CORRUPT


def test_a_damaged_one_can_be_deleted_and_is_not_overwritten(store: CheckpointStore, folder: Path) -> None:
    store.save(ID, make_state(1))
    damage(folder, 1, "manifest")
    assert store.entries(ID) == []
    assert store.save(ID, make_state(2)).number == 2
    store.delete(ID, 1)
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint-00000002.json",
        "checkpoint-00000002.safetensors",
        "trainer.json",
    ]


def test_a_state_that_does_not_fit_leaves_nothing(store: CheckpointStore, folder: Path) -> None:
    before = tree(folder)
    for state in (
        TrainerState({"x": torch.ones(1, dtype=torch.complex128)}, {}),
        TrainerState({}, {"x": "y" * (65 << 20)}),
    ):
        with pytest.raises(ServiceError) as error:
            store.save(ID, state)
        assert error.value.reason is ErrorReason.TRAINER_INVALID
    with pytest.raises(TypeError):
        store.save(ID, TrainerState({}, cast("dict[str, Json]", {"x": object()})))
    assert tree(folder) == before


def test_saving_loading_and_deleting_at_once_ends_well(storage: TrainingStorage) -> None:
    store = storage.checkpoints
    with_trainer(storage, OTHER_ID)
    start = threading.Barrier(6)

    def save(trainer_id: str) -> list[int]:
        start.wait()
        return [store.save(trainer_id, make_state(seed)).number for seed in range(8)]

    def load(trainer_id: str) -> int:
        start.wait()
        other = 0
        for _ in range(40):
            try:
                found = store.load(trainer_id)
            except ServiceError as error:
                other += error.reason is not ErrorReason.UNKNOWN_CHECKPOINT
            else:
                assert_same_state(found.state, make_state(cast("int", found.state.facts["step"])))
        return other

    with ThreadPoolExecutor(6) as pool:
        saves = [pool.submit(save, one) for one in (ID, ID, OTHER_ID)]
        loads = [pool.submit(load, one) for one in (ID, ID, OTHER_ID)]
        numbers = [future.result() for future in saves]
        assert [future.result() for future in loads] == [0, 0, 0]
    assert sorted(numbers[0] + numbers[1]) == list(range(1, 17))
    assert [checkpoint.number for checkpoint in store.entries(ID)] == [14, 15, 16]


def test_a_trainer_deleted_while_it_is_saved_is_gone(storage: TrainingStorage, tmp_path: Path) -> None:
    store = storage.checkpoints
    with ThreadPoolExecutor(1) as pool, storage.trainers.locked(ID):
        saving = pool.submit(store.save, ID, make_state())
        storage.trainers.delete(ID)
    with pytest.raises(ServiceError) as error:
        saving.result()
    assert error.value.reason is ErrorReason.UNKNOWN_TRAINER
    assert tree(tmp_path / "data") == []


def test_every_step_is_on_disk_before_the_next(
    store: CheckpointStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (1, 2, 3):
        store.save(ID, make_state(seed))
    events: list[str] = []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

    def noted_fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        events.append("sync folder" if path == folder else "sync file")
        fsync(descriptor)

    def noted_replace(source: Path, target: Path) -> None:
        events.append(f"rename to {target.name}")
        replace(source, target)

    def noted_unlink(path: Path) -> None:
        events.append(f"remove {path.name}")
        unlink(path)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    monkeypatch.setattr(os, "unlink", noted_unlink)
    store.save(ID, make_state(4))
    assert events == [
        "sync file",
        "rename to checkpoint-00000004.safetensors",
        "sync folder",
        "sync file",
        "rename to checkpoint-00000004.json",
        "sync folder",
        "remove checkpoint-00000001.json",
        "sync folder",
        "remove checkpoint-00000001.safetensors",
    ]
