"""Files that survive a crash."""

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage.disk_errors import disk_errors
from trocar_server.storage.durable import (
    DamagedError,
    PartialFile,
    link_durably,
    make_folder,
    read_whole,
    remove_partial,
    write_durably,
)


def test_only_its_owner_may_read_a_file(tmp_path: Path) -> None:
    write_durably(tmp_path / "x.json", b"abc")
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o600


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    write_durably(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        write_durably(path, b"new")
    assert (list(tmp_path.iterdir()), path.read_bytes()) == ([path], b"old")


def test_the_bytes_are_on_disk_before_the_name_is_and_the_name_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        events.append("folder" if Path(f"/proc/self/fd/{descriptor}").resolve() == tmp_path else "file")
        fsync(descriptor)

    def noted_replace(source: Path, target: Path) -> None:
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write_durably(tmp_path / "x.json", b"abc")
    assert events == ["file", "rename", "folder"]


def test_a_file_may_come_in_pieces(tmp_path: Path) -> None:
    pieces: list[bytes | memoryview] = [b"abc", memoryview(b"def"), b""]
    write_durably(tmp_path / "x.json", pieces)
    assert (tmp_path / "x.json").read_bytes() == b"abcdef"


def test_a_disk_that_takes_little_at_once_gets_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    write_durably(tmp_path / "x.json", bytes(range(100)))
    assert (tmp_path / "x.json").read_bytes() == bytes(range(100))


def test_pieces_that_fail_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write_durably(tmp_path / "x.json", (bytes([1 // part]) for part in (1, 0)))
    assert list(tmp_path.iterdir()) == []


def test_what_is_being_written_stays_and_what_nobody_writes_any_more_goes(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"abc"
        remove_partial(tmp_path)  # of another server, which starts meanwhile
        yield b"def"

    write_durably(tmp_path / "x.json", pieces())
    assert (tmp_path / "x.json").read_bytes() == b"abcdef"
    partial = PartialFile(tmp_path, "y-")
    remove_partial(tmp_path)
    assert partial.path.exists()
    os.close(partial.descriptor)  # as the kernel does when a process dies
    remove_partial(tmp_path, "z-")
    assert partial.path.exists()
    remove_partial(tmp_path)
    assert [found.name for found in tmp_path.iterdir()] == ["x.json"]


def test_a_whole_file_without_its_final_name_is_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def late(source: Path, target: Path) -> None:
        remove_partial(tmp_path)  # of another server, which starts meanwhile
        replace(source, target)

    monkeypatch.setattr(os, "replace", late)
    write_durably(tmp_path / "x.json", b"abc")
    assert (tmp_path / "x.json").read_bytes() == b"abc"


def test_a_file_that_is_taken_for_a_leftover_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, others = fcntl.flock, iter([True, False])

    def late(descriptor: int, operation: int) -> None:
        if next(others, False):
            for found in tmp_path.iterdir():
                found.unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    write_durably(tmp_path / "x.json", b"abc")
    assert [found.name for found in tmp_path.iterdir()] == ["x.json"]
    assert (tmp_path / "x.json").read_bytes() == b"abc"


def test_a_file_system_without_locks_takes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unknown)
    write_durably(tmp_path / "x.json", b"abc")
    partial = PartialFile(tmp_path)
    os.close(partial.descriptor)
    remove_partial(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([partial.path, tmp_path / "x.json"])


def test_folders_are_made_down_to_the_last_for_their_owner_alone(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b" / "c")
    make_folder(tmp_path / "a" / "b" / "c")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c")] == [0o700] * 3


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "long"])
def test_what_is_no_file_of_ours_is_damaged(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "link":
        (tmp_path / "real").write_bytes(b"abc")
        path.symlink_to(tmp_path / "real")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"abcd")
    with pytest.raises(DamagedError):
        read_whole(path, 3)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOSPC, ErrorReason.STORAGE_FULL),
        (errno.EDQUOT, ErrorReason.STORAGE_FULL),
        (errno.EIO, ErrorReason.STORAGE_UNAVAILABLE),
        (errno.EROFS, ErrorReason.STORAGE_UNAVAILABLE),
        (errno.EACCES, ErrorReason.STORAGE_UNAVAILABLE),
    ],
)
def test_errors_of_the_disk_have_reasons_and_name_no_path(code: int, reason: ErrorReason) -> None:
    with pytest.raises(ServiceError) as error, disk_errors("checkpoint"):
        raise OSError(code, os.strerror(code), "/secret/path")
    assert error.value.reason is reason
    assert "secret" not in error.value.message


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_the_mode_of_the_file_that_is_replaced_stays(tmp_path: Path, mode: int) -> None:
    target = tmp_path / "f"
    target.write_bytes(b"old")
    target.chmod(mode)
    write_durably(target, b"new", is_private=False)
    write_durably(target, b"newer")
    assert target.stat().st_mode & 0o777 == mode


def test_a_new_file_is_its_owners_unless_the_umask_decides(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_durably(tmp_path / "private", b"")
        write_durably(tmp_path / "other", b"", is_private=False)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("private", "other")] == [0o600, 0o640]


def test_what_need_not_survive_a_crash_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "fsync")
    write_durably(tmp_path / "f", b"x", is_durable=False)
    assert (tmp_path / "f").read_bytes() == b"x"


def old_target(folder: Path, kind: str) -> Path:
    path = folder / "x"
    if kind == "file":
        path.write_bytes(b"old")
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        (folder / "real").write_bytes(b"old")
        path.symlink_to(folder / "real")
    else:
        path.symlink_to(folder / "absent")
    return path


def no_links(*_: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling link"])
def test_a_new_file_replaces_nothing(
    tmp_path: Path, kind: str, has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = old_target(tmp_path, kind)
    before = {entry.name: (entry.is_symlink(), entry.is_file()) for entry in tmp_path.iterdir()}
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(FileExistsError):
        write_durably(path, b"new", is_new=True)
    assert {entry.name: (entry.is_symlink(), entry.is_file()) for entry in tmp_path.iterdir()} == before
    assert not path.is_file() or path.read_bytes() == b"old"


@pytest.mark.parametrize("has_links", [True, False])
def test_a_new_file_has_its_name_once_it_is_complete(
    tmp_path: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)

    def pieces() -> Iterator[bytes]:
        yield b"abc"
        assert not (tmp_path / "x").exists()
        yield b"def"

    write_durably(tmp_path / "x", pieces(), is_new=True)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", b"abcdef")]
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "x").stat().st_nlink == 1


def test_of_two_writers_of_a_new_file_one_is_refused(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"late"
        write_durably(tmp_path / "x", b"early", is_new=True)

    with pytest.raises(FileExistsError):
        write_durably(tmp_path / "x", pieces(), is_new=True)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", b"early")]


def test_a_new_file_that_cannot_be_renamed_leaves_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="space"):
        write_durably(tmp_path / "x", b"abc", is_new=True)
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    path = old_target(tmp_path, "link")
    write_durably(path, b"new")
    assert (path.is_symlink(), path.read_bytes()) == (False, b"new")
    assert (tmp_path / "real").read_bytes() == b"old"


def test_a_partial_file_is_removed_unless_it_is_published(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    for is_kept in (False, True):
        partial = PartialFile(tmp_path)
        partial.write(b"new")
        if is_kept:
            partial.publish(tmp_path / "x")
        partial.close()
        partial.close()
        expected = b"new" if is_kept else b"old"
        assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", expected)]
        with pytest.raises(OSError, match="closed"):
            partial.write(b"more")


@pytest.mark.parametrize("code", [0, errno.EPERM, errno.EMLINK, errno.EIO])
def test_a_second_name_takes_the_place_of_what_has_it(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "x"
    write_durably(source, b"whole")
    (tmp_path / "y").write_bytes(b"damaged")

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    if code:
        monkeypatch.setattr(os, "link", fail)
    if code == errno.EIO:
        with pytest.raises(OSError, match="error"):
            link_durably(source, tmp_path / "y")
    else:
        assert link_durably(source, tmp_path / "y") == (not code)
    assert (tmp_path / "y").exists() == (not code)
    assert source.stat().st_nlink == (1 if code else 2)
