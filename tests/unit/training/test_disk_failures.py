"""A disk that fails at any operation: what was there still is, nothing of the new is left, and it is told.

Every operation that changes the disk fails in turn, once, or from there on as on a disk that is full.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.training.stores import (
    ID,
    OTHER_ID,
    SPEC,
    assert_same_state,
    count_operations,
    fuse,
    make_state,
    opened,
    tree,
    with_trainer,
)
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, ModelSpec, load_model
from trocar_server.training.files.trainer_storage import TrainingStorage

REASONS = {errno.ENOSPC: ErrorReason.STORAGE_FULL, errno.EIO: ErrorReason.STORAGE_UNAVAILABLE}
WEIGHTS = {"w": torch.arange(10.0)}


@pytest.fixture(scope="module")
def base() -> HostedModel:
    spec = ModelSpec(
        "net", "tests.unit.models.factories:Net", "random:1", arguments=(6,), input_shape=(3, 8, 8)
    )
    return load_model(spec, torch.device("cpu"), Path("unused"))


@pytest.fixture
def storage(tmp_path: Path, base: HostedModel) -> Iterator[TrainingStorage]:
    with opened(tmp_path / "data", keep=2) as storage:
        with_trainer(storage)
        for seed in (1, 2):
            storage.checkpoints.save(ID, make_state(seed))
        storage.published.publish("flowers", "alice", base, WEIGHTS)
        yield storage


def writes(storage: TrainingStorage, base: HostedModel) -> dict[str, Callable[[], object]]:
    return {
        "save": lambda: storage.checkpoints.save(ID, make_state(3)),
        "create": lambda: storage.trainers.create(OTHER_ID, "bob", SPEC, "m", ""),
        "publish": lambda: storage.published.publish("birds", "bob", base, WEIGHTS),
        "replace": lambda: storage.published.publish("flowers", "bob", base, {}, is_replacing=True),
        "update": lambda: storage.trainers.update(ID, {"new": 1}),
    }


def assert_as_before(storage: TrainingStorage) -> None:
    assert [record.trainer_id for record in storage.trainers.entries()] == [ID]
    assert [checkpoint.number for checkpoint in storage.checkpoints.entries(ID)] == [1, 2]
    for seed in (1, 2):
        assert_same_state(storage.checkpoints.load(ID, seed).state, make_state(seed))
    assert [(model.model_id, model.principal) for model in storage.published.entries()] == [
        ("flowers", "alice")
    ]


NAMES = ["save", "create", "publish", "replace", "update"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_that_fails_once_leaves_all_as_it_was(
    tmp_path: Path, storage: TrainingStorage, base: HostedModel, name: str, code: int
) -> None:
    data, saved = tmp_path / "data", tmp_path / "saved"
    before = tree(data)
    shutil.copytree(data, saved)
    count = count_operations(writes(storage, base)[name])
    assert count > 3
    failures = 0
    for at in range(count):
        shutil.rmtree(data)
        shutil.copytree(saved, data)

        def fail(operation: str, arguments: tuple[Any, ...]) -> None:
            raise OSError(code, os.strerror(code))

        with fuse(at, fail):
            error = error_of(writes(storage, base)[name])
        if error is None:  # old ones that could not be dropped
            continue
        failures += 1
        assert error.reason is REASONS[code]
        assert str(tmp_path) not in error.message
        if name == "update":
            assert storage.trainers.get(ID).facts in ({}, {"new": 1})
        else:
            assert_as_before(storage)
        assert tree(data) == before
    assert failures > 3


@pytest.mark.parametrize("name", NAMES)
def test_a_disk_that_is_full_from_some_moment_on_keeps_what_it_has(
    tmp_path: Path, storage: TrainingStorage, base: HostedModel, name: str
) -> None:
    data, saved = tmp_path / "data", tmp_path / "saved"
    before = tree(data)
    shutil.copytree(data, saved)
    count = count_operations(writes(storage, base)[name])
    for at in range(count):
        shutil.rmtree(data)
        shutil.copytree(saved, data)
        with pytest.MonkeyPatch.context() as patch:
            full: list[bool] = []

            def no_room(*_: Any, full: list[bool] = full) -> None:
                full.append(True)

            for operation in ("write", "fsync", "mkdir"):
                patch.setattr(os, operation, fails_when(full, getattr(os, operation)))
            with fuse(at, no_room):
                error = error_of(writes(storage, base)[name])
        if error is None:
            continue
        assert error.reason is ErrorReason.STORAGE_FULL
        if name == "update":
            assert storage.trainers.get(ID).facts in ({}, {"new": 1})
        elif name != "replace":
            assert_as_before(storage)
            assert tree(data) == before
        (model,) = storage.published.entries()
        assert (data / "published" / model.model_id / model.weights_file).exists()


def error_of(call: Callable[[], object]) -> ServiceError | None:
    try:
        call()
    except ServiceError as error:
        return error
    return None


def fails_when(full: list[bool], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    return call


def test_a_failed_fsync_is_not_tried_again(storage: TrainingStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []

    def broken(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(ServiceError):
        storage.checkpoints.save(ID, make_state(3))
    assert len(synced) == len(set(synced)) == 2  # the file, and the folder after the file was removed


def test_old_checkpoints_that_cannot_be_dropped_are_dropped_later(
    storage: TrainingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: object) -> None:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", broken)
        assert storage.checkpoints.save(ID, make_state(3)).number == 3
    assert [one.number for one in storage.checkpoints.entries(ID)] == [1, 2, 3]
    storage.checkpoints.save(ID, make_state(4))
    assert [one.number for one in storage.checkpoints.entries(ID)] == [3, 4]


def test_a_checkpoint_can_be_deleted_on_a_full_disk(
    storage: TrainingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        storage.checkpoints.delete(ID, 2)
    assert [one.number for one in storage.checkpoints.entries(ID)] == [1]
    assert storage.checkpoints.save(ID, make_state(3)).number == 3


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_reading_fails_as_a_service_error(
    storage: TrainingStorage, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def broken(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "readv", broken)
    with pytest.raises(ServiceError) as error:
        storage.checkpoints.load(ID)
    is_broken = code == errno.EIO
    assert error.value.reason is (
        ErrorReason.CHECKPOINT_CORRUPT if is_broken else ErrorReason.STORAGE_UNAVAILABLE
    )


@pytest.mark.parametrize("name", ["delete", "delete checkpoint", "remove"])
def test_a_removal_that_fails_can_be_done_again(tmp_path: Path, storage: TrainingStorage, name: str) -> None:
    removals: dict[str, Callable[[], object]] = {
        "delete": lambda: storage.trainers.delete(ID),
        "delete checkpoint": lambda: storage.checkpoints.delete(ID, 2),
        "remove": lambda: storage.published.remove("flowers"),
    }
    data, saved = tmp_path / "data", tmp_path / "saved"
    shutil.copytree(data, saved)
    count = count_operations(removals[name])
    after = tree(data)
    for at in range(count):
        shutil.rmtree(data)
        shutil.copytree(saved, data)

        def fail(operation: str, arguments: tuple[Any, ...]) -> None:
            raise OSError(errno.EIO, "no")

        with suppress(ServiceError), fuse(at, fail):
            removals[name]()
        with suppress(ServiceError):  # it is gone already
            removals[name]()
        storage.close()
        with opened(data):
            assert tree(data) == after
