import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trocar_server.spool.files import directory
from trocar_server.spool.files.directory import SpoolDirectory, remove_leftovers

NAME = "trocar-spool-4242-0123abcd"


@pytest.fixture
def leftover(tmp_path: Path) -> Path:
    """The folder of a process that was killed: nobody holds the lock any more (test_kill has real ones)."""
    made = SpoolDirectory(tmp_path)
    for number in range(3):
        (made.path / f"{number:08d}.safetensors").write_bytes(b"data")
    made.forget()
    return made.path


def test_a_folder_and_its_lock_are_the_owners_alone(tmp_path: Path) -> None:
    made = SpoolDirectory(tmp_path / "new" / "parent")
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert (made.path / "lock").stat().st_mode & 0o777 == 0o600
    assert made.exists()
    made.close()
    made.close()
    assert list((tmp_path / "new" / "parent").iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed(leftover: Path, tmp_path: Path) -> None:
    assert len(list(leftover.iterdir())) == 4
    assert remove_leftovers(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_next_start_removes_what_was_left(leftover: Path, tmp_path: Path) -> None:
    made = SpoolDirectory(tmp_path)
    assert list(tmp_path.iterdir()) == [made.path]
    assert not leftover.exists()
    made.close()


def test_a_folder_whose_process_lives_stays(tmp_path: Path) -> None:
    made = SpoolDirectory(tmp_path)
    (made.path / "00000001.safetensors").write_bytes(b"data")
    assert remove_leftovers(tmp_path) == 0
    assert len(list(made.path.iterdir())) == 2
    made.close()


def test_a_removal_that_was_cut_short_is_finished_later(leftover: Path, tmp_path: Path) -> None:
    for path in leftover.glob("*.safetensors"):
        path.unlink()
    assert remove_leftovers(tmp_path) == 1


def test_an_empty_folder_of_a_process_killed_at_once_is_removed(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    other = tmp_path / "trocar-spool-1-0123abcd"
    other.mkdir()
    (other / "lock").touch()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_folder_of_a_spool_does_not_disturb(leftover: Path, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"a file with the name")
    (tmp_path / "trocar-spool-7-0123abcd").symlink_to(tmp_path / "nowhere")
    assert remove_leftovers(tmp_path) == 1
    assert not leftover.exists()
    assert (tmp_path / NAME).exists()


def more_files(folder: Path) -> None:
    (folder / "notes.txt").write_bytes(b"mine")


def a_folder_inside(folder: Path) -> None:
    (folder / "00000009.safetensors.d").mkdir()


def no_mark(folder: Path) -> None:
    (folder / "lock").write_bytes(b"")


def another_mark(folder: Path) -> None:
    (folder / "lock").write_bytes(b"somebody else's lock\n")


def another_machine(folder: Path) -> None:
    (folder / "lock").write_bytes(b"trocar spool 1\nhost:elsewhere boot:1\n")


def no_lock(folder: Path) -> None:
    (folder / "lock").unlink()


def a_linked_lock(folder: Path) -> None:
    (folder / "lock").rename(folder.parent / "lock")
    (folder / "lock").symlink_to(folder.parent / "lock")


def a_pipe_as_lock(folder: Path) -> None:
    (folder / "lock").unlink()
    os.mkfifo(folder / "lock")


@pytest.mark.parametrize(
    "change",
    [
        more_files,
        a_folder_inside,
        no_mark,
        another_mark,
        another_machine,
        no_lock,
        a_linked_lock,
        a_pipe_as_lock,
    ],
)
def test_a_folder_that_only_looks_alike_stays(
    leftover: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    change(leftover)
    before = sorted(leftover.iterdir())
    assert remove_leftovers(tmp_path) == 0
    assert sorted(leftover.iterdir()) == before


@pytest.mark.parametrize(
    "name",
    [
        "trocar-spool",
        "trocar-spool-1",
        "trocar-spool-x-0123abcd",
        "trocar-spool-1-0123ABCD",
        "my-" + NAME,
        NAME + "0",
    ],
)
def test_a_folder_with_another_name_stays(leftover: Path, tmp_path: Path, name: str) -> None:
    leftover.rename(tmp_path / name)
    assert remove_leftovers(tmp_path) == 0
    assert len(list((tmp_path / name).iterdir())) == 4


def test_a_link_to_a_folder_stays_and_so_does_the_folder(leftover: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    leftover.rename(elsewhere / "data")
    leftover.symlink_to(elsewhere / "data")
    assert remove_leftovers(tmp_path) == 0
    assert len(list((elsewhere / "data").iterdir())) == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_the_folders_of_other_users_stay(leftover: Path, tmp_path: Path) -> None:
    os.chown(leftover, 65534, 65534)
    assert remove_leftovers(tmp_path) == 0
    os.chown(leftover, os.geteuid(), -1)
    os.chown(leftover / "lock", 65534, 65534)
    assert remove_leftovers(tmp_path) == 0
    assert len(list(leftover.iterdir())) == 4


def test_a_folder_that_another_process_takes_for_a_leftover_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = directory.claim_lock
    victims: list[Path] = []

    def claimed_by_another_first(path: Path) -> int | None:
        if len(victims) < 2:
            victims.append(path.parent)
            remove_leftovers(tmp_path)  # sees an empty folder
        return claim(path)

    monkeypatch.setattr(directory, "claim_lock", claimed_by_another_first)
    made = SpoolDirectory(tmp_path)
    assert made.path not in victims
    assert list(tmp_path.iterdir()) == [made.path]
    made.close()


def test_a_lock_that_another_process_holds_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def taken(lock: int, operation: int) -> None:
        other = os.open(f"/proc/self/fd/{lock}", os.O_RDWR)
        flock(other, fcntl.LOCK_EX)
        try:
            flock(lock, operation)
        finally:
            os.close(other)

    monkeypatch.setattr(fcntl, "flock", taken)
    assert directory.claim_lock(tmp_path / "lock") is None


def test_a_folder_that_is_not_there_has_no_leftovers(tmp_path: Path) -> None:
    assert remove_leftovers(tmp_path / "nowhere") == 0


def test_a_fork_while_the_lock_is_closed_closes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, close = SpoolDirectory(tmp_path), os.close
    closed: list[int] = []

    def fork_then_close(number: int) -> None:
        if not closed:
            closed.append(number)
            made.forget()  # as the child does
        close(number)

    monkeypatch.setattr(os, "close", fork_then_close)
    made.forget()
    assert len(closed) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(closed[0])
