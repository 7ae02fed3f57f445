"""A file is the old one or the complete new one, with the mode of the old one."""

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trocar._base import replacement as module
from trocar._base.replacement import folder_replacement, open_replacement, replacement, write_file


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("is_durable", [False, True])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_the_mode_of_the_old_file_stays(tmp_path: Path, mode: int, is_durable: bool) -> None:
    target = tmp_path / "f"
    target.write_bytes(b"old")
    target.chmod(mode)
    write_file(target, "new", is_durable=is_durable)
    assert (target.read_text(), mode_of(target)) == ("new", mode)


def test_a_new_file_has_the_mode_of_the_umask_or_the_one_that_is_said(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"")
    write_file(tmp_path / "b", b"", mode=0o600)
    assert (mode_of(tmp_path / "a"), mode_of(tmp_path / "b")) == (0o640, 0o600)


def test_nobody_else_reads_it_before_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "f"
    with replacement(target) as partial:
        assert mode_of(partial) == 0o600
        assert not target.exists()
    assert mode_of(target) == 0o640


def test_a_failure_leaves_the_old_file_alone(tmp_path: Path) -> None:
    target = tmp_path / "f"
    target.write_bytes(b"old")

    def write_half() -> None:
        with replacement(target) as partial:
            partial.write_bytes(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("f", b"old")]


def test_a_durable_file_is_synced_before_it_has_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []
    target = tmp_path / "f"
    monkeypatch.setattr(module, "_sync", lambda path: seen.append((path == tmp_path, target.exists())))
    write_file(target, b"x")
    assert seen == []
    target.unlink()
    write_file(target, b"x", is_durable=True)
    assert seen == [(False, False), (True, True)]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_pipe_gets_the_bytes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_file(tmp_path / "pipe", b"x")
    reader.join()
    assert read == [b"x"]
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_missing_folder_is_said_by_the_name_that_was_given(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        write_file(tmp_path / "no" / "f", b"")
    assert raised.value.filename == str(tmp_path / "no" / "f")


def test_a_file_may_come_in_pieces_of_which_a_bad_one_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "f"
    write_file(target, [b"ab", memoryview(b"cd"), b""])
    assert target.read_bytes() == b"abcd"
    with pytest.raises(ZeroDivisionError):
        write_file(target, (bytes([1 // number]) for number in (1, 0)))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("f", b"abcd")]


def test_an_open_replacement_is_the_file_once_it_is_closed(tmp_path: Path) -> None:
    target = tmp_path / "f"
    target.write_bytes(b"old")
    with open_replacement(target) as file:
        file.seek(3)
        file.write(b"d")
        file.seek(0)
        file.write(b"abc")
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"abcd"


@pytest.mark.parametrize("character", ["n", "é"])
def test_a_name_may_be_as_long_as_the_file_system_lets_it(tmp_path: Path, character: str) -> None:
    target = tmp_path / (character * (255 // len(character.encode())))
    write_file(target, b"x")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(target.name, b"x")]


def fill(target: Path, content: bytes) -> None:
    with folder_replacement(target) as partial:
        write_file(partial / "a", content)
        (partial / "below").mkdir()
        write_file(partial / "below" / "b", content)
        assert not target.exists() or (target / "a").read_bytes() == b"old"


def test_a_folder_takes_the_place_of_an_older_one_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    fill(target, b"old")
    (target / "more").touch()
    fill(target, b"new")
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"folder/a", "folder/below/b"}
    assert (target / "below" / "b").read_bytes() == b"new"


def test_a_folder_that_fails_leaves_the_older_one(tmp_path: Path) -> None:
    fill(tmp_path / "folder", b"old")
    with pytest.raises(ZeroDivisionError), folder_replacement(tmp_path / "folder") as partial:
        write_file(partial / "a", bytes([1 // 0]))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "a").read_bytes() == b"old"


def test_a_folder_has_its_name_when_all_of_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "folder"
    synced: list[tuple[str, bool]] = []
    monkeypatch.setattr(module, "_sync", lambda path: synced.append((path.name, target.exists())))
    fill(target, b"old")
    assert {name for name, is_named in synced if not is_named} >= {"a", "b", "below"}
    assert synced[-1] == (tmp_path.name, True)
