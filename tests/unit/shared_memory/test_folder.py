"""Names in the folder of shared memory: random, ours alone, and taken away when nobody needs them."""

import os
import secrets
import stat
from pathlib import Path

import pytest

from trocar_server.shared_memory.folder import create_file, remove_dead


def test_a_new_file_is_random_empty_and_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (one, first), (other, second) = create_file(tmp_path), create_file(tmp_path)
    finally:
        os.umask(before)
    found = [os.fstat(descriptor) for descriptor in (first, second)]
    assert one != other
    assert [stat.S_IMODE(entry.st_mode) for entry in found] == [0o600, 0o600]
    assert [entry.st_size for entry in found] == [0, 0]
    os.close(first)
    os.close(second)


def test_a_link_that_waits_under_the_name_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "precious"
    target.write_text("as it was")
    (tmp_path / ("trocar-" + "0" * 32)).symlink_to(target)
    (tmp_path / ("trocar-" + "1" * 32)).write_text("somebody's file")
    drawn = iter(["0" * 32, "1" * 32, "2" * 32])
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(drawn))
    name, descriptor = create_file(tmp_path)
    os.write(descriptor, b"mine")
    os.close(descriptor)
    assert name == "trocar-" + "2" * 32
    assert target.read_text() == "as it was"
    assert (tmp_path / ("trocar-" + "1" * 32)).read_text() == "somebody's file"


def test_a_folder_full_of_planted_names_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ("trocar-" + "0" * 32)).symlink_to("/dev/null")
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0" * 32)
    with pytest.raises(FileExistsError):
        create_file(tmp_path)


def test_the_janitor_takes_dead_names_and_leaves_living_ones(tmp_path: Path) -> None:
    living, descriptor = create_file(tmp_path)
    dead, gone = create_file(tmp_path)
    os.close(gone)  # as the kernel does when a server is killed
    assert remove_dead(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == [living]
    assert dead != living
    os.close(descriptor)


@pytest.mark.parametrize(
    "name",
    [
        "trocar-",
        "trocar-" + "g" * 32,
        "trocar-" + "0" * 31,
        "trocar-" + "0" * 33,
        "xtrocar-" + "0" * 32,
        "other",
    ],
)
def test_the_janitor_leaves_what_is_not_named_like_ours(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert remove_dead(tmp_path) == 0
    assert (tmp_path / name).exists()


def test_the_janitor_leaves_links_folders_and_pipes_under_our_names(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.touch()
    link, folder, pipe = (tmp_path / ("trocar-" + digit * 32) for digit in "012")
    link.symlink_to(target)
    folder.mkdir()
    os.mkfifo(pipe)
    assert remove_dead(tmp_path) == 0
    assert target.exists()
    assert link.is_symlink()
    assert folder.is_dir()
    assert pipe.is_fifo()


def test_the_janitor_leaves_another_users_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, descriptor = create_file(tmp_path)
    os.close(descriptor)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert remove_dead(tmp_path) == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_is_not_there_is_clean(tmp_path: Path) -> None:
    assert remove_dead(tmp_path / "nowhere") == 0
