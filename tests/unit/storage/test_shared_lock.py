"""The lock of a folder that several servers share."""

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from tests.support.servers.waiting import wait_until
from trocar_server.storage.shared_lock import SharedLock


def is_free(folder: Path) -> bool:
    """Whether another process could lock the folder: locks belong to open files, not to processes."""
    descriptor = os.open(folder / "lock", os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_other_servers_are_locked_out_while_it_is_held(tmp_path: Path) -> None:
    with SharedLock(tmp_path):
        assert not is_free(tmp_path)
    assert is_free(tmp_path)


def test_it_waits_for_another_server(tmp_path: Path) -> None:
    ours, theirs, order = SharedLock(tmp_path), SharedLock(tmp_path), []

    def change() -> None:
        with theirs:
            order.append("theirs")

    with ours:
        thread = threading.Thread(target=change)
        thread.start()
        wait_until(theirs._threads.locked)
        order.append("ours")
    thread.join()
    assert order == ["ours", "theirs"]


def test_an_error_inside_releases_it(tmp_path: Path) -> None:
    lock = SharedLock(tmp_path)
    with pytest.raises(ZeroDivisionError), lock:
        _ = 1 // 0
    assert is_free(tmp_path)
    with lock:
        pass


def test_a_missing_folder_stays_missing(tmp_path: Path) -> None:
    with SharedLock(tmp_path / "x"):
        pass
    assert not (tmp_path / "x").exists()


def test_a_file_system_without_locks_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unknown)
    with SharedLock(tmp_path):
        pass


def test_a_folder_that_cannot_be_used_is_an_error_once(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    lock = SharedLock(tmp_path)
    for _ in range(2):
        with pytest.raises(IsADirectoryError), lock:
            pass
