"""One cluster at a time, with several processes."""

import fcntl
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage import folder_lease
from trocar_server.storage.data_lock import FolderLock
from trocar_server.storage.folder_lease import (
    LEASE_NAME,
    OTHER_CLUSTER,
    Holder,
    lease_holder,
    new_holder,
    take_lease,
)

FIRST = Holder("a" * 32, "10.0.0.1:6379", 0.0, "gpu1")
SECOND = new_holder("b" * 32, "10.0.0.2:6379")
HOLD = r"""
import os, sys
from pathlib import Path
from trocar_server.storage.folder_lease import Holder, take_lease
lease = take_lease(Path(sys.argv[1]), Holder(sys.argv[2], "10.0.0.1:6379", 0.0, "gpu1"))
os.write(1, b"held\n")
sys.stdin.read()
"""


def held_by_process(folder: Path, holder: Holder) -> "subprocess.Popen[bytes]":
    line = [sys.executable, "-c", HOLD, str(folder), holder.cluster_id]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def refused(folder: Path, holder: Holder) -> ServiceError:
    with pytest.raises(ServiceError) as raised:
        take_lease(folder, holder)
    assert raised.value.reason is ErrorReason.STORAGE_UNAVAILABLE
    assert OTHER_CLUSTER in raised.value.details
    return raised.value


def test_a_second_cluster_is_told_who_has_the_folder_since_when_and_how_to_go_on(tmp_path: Path) -> None:
    take_lease(tmp_path / "data", FIRST)
    message = refused(tmp_path / "data", SECOND).message
    for part in ("10.0.0.1:6379", "gpu1", "since 1970-01-01 00:00:00 UTC", "trocar cluster stop", "data_dir"):
        assert part in message


def test_processes_of_one_cluster_share_the_folder(tmp_path: Path) -> None:
    leases = [take_lease(tmp_path, FIRST) for _ in range(3)]
    for lease in leases:
        refused(tmp_path, SECOND)
        lease.release()
    take_lease(tmp_path, SECOND)
    refused(tmp_path, FIRST)


def test_a_folder_is_free_when_the_last_process_of_its_cluster_was_killed_and_not_before(
    tmp_path: Path,
) -> None:
    head, replica = (held_by_process(tmp_path, FIRST) for _ in range(2))
    for process in (head, replica):
        refused(tmp_path, SECOND)
        with process:
            process.send_signal(signal.SIGKILL)
    lease = take_lease(tmp_path, SECOND)
    assert lease_holder(tmp_path) == SECOND
    lease.release()


def test_a_stopped_process_keeps_the_folder(tmp_path: Path) -> None:
    """It wakes up and writes."""
    with held_by_process(tmp_path, FIRST) as process:
        process.send_signal(signal.SIGSTOP)
        refused(tmp_path, SECOND)
        process.send_signal(signal.SIGKILL)


def test_the_same_cluster_finds_its_folder_after_its_head_was_started_again(tmp_path: Path) -> None:
    head, replica = take_lease(tmp_path, FIRST), take_lease(tmp_path, FIRST)
    head.release()
    again = take_lease(tmp_path, FIRST)
    replica.release()
    refused(tmp_path, SECOND)
    again.release()


def test_a_replica_that_comes_back_after_another_cluster_took_the_folder_is_refused(tmp_path: Path) -> None:
    take_lease(tmp_path, FIRST).release()
    with held_by_process(tmp_path, SECOND) as process:
        refused(tmp_path, FIRST)
        process.kill()


def test_of_many_clusters_that_begin_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    def begin(number: int) -> FolderLock | None:
        try:
            return take_lease(tmp_path, new_holder(f"{number:032}", "10.0.0.1:6379"))
        except ServiceError:
            return None

    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            taken = [lease for lease in threads.map(begin, range(8)) if lease is not None]
            assert len(taken) <= 1
            for lease in taken:
                lease.release()


def test_of_one_cluster_all_that_begin_at_once_get_the_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            for lease in list(threads.map(lambda _: take_lease(tmp_path, FIRST), range(8))):
                lease.release()


def test_another_cluster_that_comes_between_alone_and_shared_has_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that is changed is released first."""
    write = folder_lease._write
    others: list[FolderLock] = []

    def overtaken(descriptor: int, holder: Holder) -> None:
        write(descriptor, holder)
        if holder == FIRST:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            others.append(take_lease(tmp_path, SECOND))

    monkeypatch.setattr(folder_lease, "_write", overtaken)
    refused(tmp_path, FIRST)
    assert lease_holder(tmp_path) == SECOND


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"other": 1}', b"\xff" * 5000])
def test_a_file_without_a_name_says_a_cluster(tmp_path: Path, content: bytes) -> None:
    lease = take_lease(tmp_path, FIRST)
    (tmp_path / LEASE_NAME).write_bytes(content)
    assert "a cluster uses" in refused(tmp_path, SECOND).message
    assert lease_holder(tmp_path) == Holder("", "", 0.0)
    lease.release()
    take_lease(tmp_path, SECOND)
    assert lease_holder(tmp_path) == SECOND


def test_nobody_holds_a_folder_that_was_left(tmp_path: Path) -> None:
    assert lease_holder(tmp_path) is None
    take_lease(tmp_path, FIRST).release()
    assert lease_holder(tmp_path) is None
    assert (tmp_path / LEASE_NAME).stat().st_mode & 0o777 == 0o600
