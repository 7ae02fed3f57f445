"""One server at a time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage.data_lock import lock_folder

HOLD = r"""
import os, sys
from pathlib import Path
from trocar_server.storage.data_lock import lock_folder
lock = lock_folder(Path(sys.argv[1]))
os.write(1, b"held\n")
sys.stdin.read()
"""
FORK = r"""
import os, sys
from pathlib import Path
from trocar_server.storage.data_lock import lock_folder
lock = lock_folder(Path(sys.argv[1]))
reading, writing = os.pipe()
if os.fork() == 0:
    os.close(writing)
    os.read(reading, 1)          # lives on until the one who holds the other end is gone
    os._exit(0)
os.close(reading)
os.write(1, b"held\n")
sys.stdin.readline()
lock.release()
os.write(1, b"released\n")
sys.stdin.read()
"""


def start(program: str, folder: Path) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-c", program, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.wait(60)


def test_a_second_server_is_told_which_is_the_first(tmp_path: Path) -> None:
    first = start(HOLD, tmp_path / "trainers")
    with pytest.raises(ServiceError, match=rf"another server \(process {first.pid}\)") as error:
        lock_folder(tmp_path / "trainers")
    end(first)
    assert error.value.reason is ErrorReason.STORAGE_UNAVAILABLE
    assert error.value.details["process"] == str(first.pid)
    assert str(tmp_path) not in error.value.message


def test_a_killed_server_holds_nothing(tmp_path: Path) -> None:
    first = start(HOLD, tmp_path)
    first.send_signal(signal.SIGKILL)
    first.wait(60)
    lock_folder(tmp_path).release()
    end(first)


def test_two_in_one_process_are_two(tmp_path: Path) -> None:
    first = lock_folder(tmp_path)
    with pytest.raises(ServiceError, match=f"process {os.getpid()}"):
        lock_folder(tmp_path)
    first.release()
    first.release()
    lock_folder(tmp_path).release()


def test_a_lock_that_was_released_is_free_though_a_forked_process_lives(tmp_path: Path) -> None:
    first = start(FORK, tmp_path)
    assert first.stdin is not None
    assert first.stdout is not None
    first.stdin.write(b"\n")
    first.stdin.flush()
    assert first.stdout.readline() == b"released\n"
    lock_folder(tmp_path).release()
    end(first)


def test_a_forked_process_does_not_hold_the_lock_of_a_killed_one(tmp_path: Path) -> None:
    program = FORK.replace("if os.fork() == 0:", "if os.fork() == 0:\n    os.write(1, b'forked\\n')").replace(
        "os._exit(0)", "sys.stdin.read(); os._exit(0)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert {process.stdout.readline(), process.stdout.readline()} == {b"held\n", b"forked\n"}
    process.kill()
    process.wait(60)
    lock_folder(tmp_path).release()
    end(process)


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "trainers").write_bytes(b"")
    with pytest.raises(ServiceError) as error:
        lock_folder(tmp_path / "trainers")
    assert error.value.reason is ErrorReason.STORAGE_UNAVAILABLE


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ServiceError):
        lock_folder(tmp_path)
    assert (tmp_path / "precious").read_text() == "keep"
