"""Opening the stores."""

from pathlib import Path

import pytest

from tests.unit.training.stores import ID, make_state, opened, tree, with_trainer
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.files.trainer_storage import StorageOnDemand, TrainingStorage, published_store


def test_a_second_server_cannot_open_it_and_harms_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as storage:
        with_trainer(storage)
        partial = tmp_path / "trainers" / ID / f"checkpoint-00000001-{'a' * 32}.partial"
        partial.write_bytes(b"being written")
        with pytest.raises(ServiceError):
            TrainingStorage(tmp_path, keep=3)
        assert partial.exists()
    with opened(tmp_path) as storage:
        assert not partial.exists()
        assert len(storage.trainers.entries()) == 1


def test_a_local_server_has_it_as_soon_as_the_other_is_gone(tmp_path: Path) -> None:
    local = StorageOnDemand(tmp_path, keep=3)
    with opened(tmp_path) as storage:
        with_trainer(storage)
        for _ in range(2):
            with pytest.raises(ServiceError) as error:
                local.get()
            assert error.value.reason is ErrorReason.STORAGE_UNAVAILABLE
    assert local.get() is local.get()
    assert len(local.get().trainers.entries()) == 1
    local.close()
    local.close()
    with opened(tmp_path):
        pass


def test_a_local_server_without_trainers_makes_no_folder(tmp_path: Path) -> None:
    StorageOnDemand(tmp_path / "data", keep=3).close()
    assert published_store(tmp_path / "data").entries() == []
    assert list(tmp_path.iterdir()) == []


def test_saves_of_a_data_directory_with_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(Path("data")) as storage:
        with_trainer(storage)
        storage.checkpoints.save(ID, make_state())
    assert len(tree(tmp_path / "data")) == 3


def test_a_server_without_trainers_is_in_nobodys_way(tmp_path: Path) -> None:
    with opened(tmp_path):
        assert StorageOnDemand(tmp_path, keep=3).existing() is None
