"""Owners of trainers on shared storage: a trainer moves whole, to one owner, and no write is lost."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.stores import ID, OTHER_ID, SPEC, count_operations, fuse, tree
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.files.owner_folders import OwnerFolders
from trocar_server.training.files.trainer_store import TrainerStore

FILES = {"checkpoint-00000001.json": b"one", "step-00000001-00000004.safetensors": b"four"}


class CutOffError(BaseException):
    """Ends a takeover as a kill does: nothing is tidied up."""


def owner(root: Path, name: str, *trainers: str) -> OwnerFolders:
    """Return the folders as an owner sees them, with trainers of its own."""
    folders = OwnerFolders(root, name)
    for trainer_id in trainers:
        TrainerStore(folders.own, is_shared=True).create(trainer_id, "alice", SPEC, "resnet18", "")
        for file, content in FILES.items():
            (folders.own / trainer_id / file).write_bytes(content)
    return folders


def assert_whole(folders: OwnerFolders, trainer_id: str = ID) -> None:
    """The trainer is at this owner alone, with every file of it."""
    assert folders.owner_of(trainer_id) == folders.own.name
    found = folders.own / trainer_id
    assert {path.name for path in found.iterdir()} == {*FILES, "trainer.json"}
    assert all((found / name).read_bytes() == content for name, content in FILES.items())
    assert TrainerStore(folders.own, is_shared=True).get(trainer_id).principal == "alice"


def test_everyone_sees_whose_a_trainer_is(tmp_path: Path) -> None:
    first, second = owner(tmp_path, "a", ID), owner(tmp_path, "b", OTHER_ID)
    (tmp_path / "c").mkdir()
    assert (first.others(), second.others(), owner(tmp_path, "d").others()) == (
        ["b", "c"],
        ["a", "c"],
        ["a", "b", "c"],
    )
    assert first.trainer_ids("b") == [OTHER_ID]
    assert first.trainer_ids("missing") == []
    assert [record.trainer_id for record in first.records_elsewhere()] == [OTHER_ID]
    assert (first.owner_of(OTHER_ID), second.owner_of(ID), first.owner_of("0" * 32)) == ("b", "a", None)
    assert first.owner_of(f"../b/{OTHER_ID}") is None


def test_a_damaged_record_is_left_out(tmp_path: Path) -> None:
    first = owner(tmp_path, "a")
    owner(tmp_path, "b", ID, OTHER_ID)
    (tmp_path / "b" / ID / "trainer.json").write_bytes(b"{")
    assert [record.trainer_id for record in first.records_elsewhere()] == [OTHER_ID]


def test_a_trainer_is_taken_over_once(tmp_path: Path) -> None:
    owner(tmp_path, "a", ID)
    second, third = owner(tmp_path, "b"), owner(tmp_path, "c")
    assert second.take_over("a", ID)
    assert_whole(second)
    assert not third.take_over("a", ID)
    assert_whole(second)
    assert tree(tmp_path / "c") == []
    assert third.take_over("b", ID)  # which is lost in its turn
    assert_whole(third)


def test_a_trainer_that_was_being_created_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "a" / ID).mkdir(parents=True)
    second = owner(tmp_path, "b")
    assert not second.take_over("a", ID)
    assert second.owner_of(ID) is None


def test_only_an_owner_without_trainers_is_forgotten(tmp_path: Path) -> None:
    owner(tmp_path, "a", ID)
    second = owner(tmp_path, "b")
    (tmp_path / "a" / "lock").touch()
    second.forget("a")
    assert second.owner_of(ID) == "a"
    assert second.take_over("a", ID)
    second.forget("a")
    assert not (tmp_path / "a").exists()
    second.forget("a")


@pytest.mark.parametrize("by", ["itself", "another"])
def test_a_takeover_that_was_cut_off_anywhere_is_ended(tmp_path: Path, by: str) -> None:
    def cut(name: str, arguments: tuple[Any, ...]) -> None:
        raise CutOffError

    def prepare(number: int) -> tuple[OwnerFolders, OwnerFolders]:
        root = tmp_path / str(number)
        owner(root, "a", ID)
        return owner(root, "b"), owner(root, "c")

    second, _ = prepare(-1)
    count = count_operations(lambda: second.take_over("a", ID))
    assert count > len(FILES)
    for at in range(count):
        second, third = prepare(at)
        with fuse(at, cut), pytest.raises(CutOffError):
            second.take_over("a", ID)
        if by == "itself":
            assert second.take_over("b", ID) or second.take_over("a", ID), at
            assert_whole(second)
        else:
            assert third.take_over("b", ID) or third.take_over("a", ID), at
            third.take_over("a", ID)
            assert third.owner_of(ID) == "c"
            assert {*FILES, "trainer.json"} <= {path.name for path in (third.own / ID).iterdir()}


def test_an_error_of_the_disk_is_told_and_the_rest_is_moved_later(tmp_path: Path) -> None:
    owner(tmp_path, "a", ID)
    second = owner(tmp_path, "b")

    def fail(name: str, arguments: tuple[Any, ...]) -> None:
        raise OSError(5, name)

    with fuse(3, fail), pytest.raises(ServiceError) as error:
        second.take_over("a", ID)
    assert error.value.reason is ErrorReason.STORAGE_UNAVAILABLE
    assert second.take_over("b", ID) or second.take_over("a", ID)
    assert_whole(second)


def test_a_write_of_the_lost_owner_is_moved_or_fails(tmp_path: Path) -> None:
    """It was only slow: it has the folder open, which is moved and then removed."""
    owner(tmp_path, "a", ID)
    second = owner(tmp_path, "b")
    folder = os.open(tmp_path / "a" / ID, os.O_RDONLY | os.O_DIRECTORY)
    written: list[str] = []

    def write(name: str) -> None:
        with os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT, dir_fd=folder), "wb") as file:
            file.write(b"late")

    with pytest.MonkeyPatch.context() as patch:
        remove = os.rmdir

        def rmdir(*arguments: Any, **named: Any) -> None:
            if len(written) < 3:  # after everything was moved, before the folder goes
                written.append(f"late-{len(written)}")
                write(written[-1])
            remove(*arguments, **named)

        patch.setattr(os, "rmdir", rmdir)
        assert second.take_over("a", ID)
    assert len(written) == 3
    found = {path.name for path in (second.own / ID).iterdir()}
    assert found == {*FILES, "trainer.json", *written}
    with pytest.raises(FileNotFoundError):
        write("too-late")
    os.close(folder)


def test_a_folder_that_keeps_being_written_to_is_an_error(tmp_path: Path) -> None:
    owner(tmp_path, "a", ID)
    second = owner(tmp_path, "b")
    with pytest.MonkeyPatch.context() as patch:

        def rmdir(path: Any) -> None:
            raise OSError(39, "not empty")

        patch.setattr(os, "rmdir", rmdir)
        with pytest.raises(ServiceError) as error:
            second.take_over("a", ID)
    assert error.value.reason is ErrorReason.STORAGE_UNAVAILABLE
    assert second.take_over("b", ID)
    assert_whole(second)
