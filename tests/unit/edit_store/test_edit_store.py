"""Stored lists: durable, each its principal's own, limited, and never half a list."""

import fcntl
import hashlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.servers import warm_python
from trocar_api.reasons import ErrorReason
from trocar_server.edit_store import EditStore, StoredEntry, edit_store
from trocar_server.errors import ServiceError
from trocar_server.models import ANONYMOUS
from trocar_server.storage import owned_files
from trocar_server.storage.durable import write_durably


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data" / "edits"


@pytest.fixture
def kept(folder: Path) -> EditStore:
    return EditStore(folder, clock=lambda: 7.5)


def refused(call: Callable[[], object]) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        call()
    return caught.value


def reason(call: Callable[[], object]) -> ErrorReason:
    return refused(call).reason


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / "lock")


def names(kept: EditStore, principal: str, model_id: str = "") -> list[tuple[str, str]]:
    return [(entry.model_id, entry.name) for entry in kept.entries(principal, model_id)]


def test_a_list_survives_a_restart(kept: EditStore, folder: Path) -> None:
    stored = kept.put("alice", "net", "one", b"description", b"tensors")
    assert stored == StoredEntry("alice", "net", "one", 7.5, b"description", b"tensors")
    assert EditStore(folder).get("alice", "net", "one") == stored
    assert EditStore(folder).entries("alice") == [stored]


def test_an_empty_store_makes_no_folder_and_lists_nothing(kept: EditStore, folder: Path) -> None:
    assert kept.entries("alice") == []
    kept.clean()
    assert not folder.exists()


def test_lists_are_sorted_by_model_and_name(kept: EditStore) -> None:
    for model_id, name in (("b", "x"), ("a", "z"), ("a", "y")):
        kept.put("alice", model_id, name, b"")
    assert names(kept, "alice") == [("a", "y"), ("a", "z"), ("b", "x")]
    assert names(kept, "alice", "a") == [("a", "y"), ("a", "z")]
    assert names(kept, "alice", "nowhere") == []


def test_a_list_asked_for_while_the_last_one_is_deleted_is_empty(
    kept: EditStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.put("alice", "m", "n", b"d")
    scandir = os.scandir

    def deleted_before(path: Any = ".") -> Any:
        monkeypatch.setattr(os, "scandir", scandir)
        kept.delete("alice", "m", "n")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deleted_before)
    assert kept.entries("alice") == []


def test_a_name_is_taken_once_unless_it_is_to_be_replaced(kept: EditStore) -> None:
    kept.put("alice", "net", "one", b"old")
    assert reason(lambda: kept.put("alice", "net", "one", b"new")) is ErrorReason.EDITS_EXIST
    assert kept.get("alice", "net", "one").description == b"old"
    kept.put("alice", "net", "one", b"new", is_replacing=True)
    assert kept.get("alice", "net", "one").description == b"new"
    assert len(kept.entries("alice")) == 1


def test_a_name_belongs_to_a_model_and_a_principal(kept: EditStore) -> None:
    for principal, model_id in (("alice", "net"), ("alice", "other"), ("bob", "net")):
        kept.put(principal, model_id, "one", f"{principal} {model_id}".encode())
    assert kept.get("bob", "net", "one").description == b"bob net"
    kept.delete("alice", "net", "one")
    assert names(kept, "alice") == [("other", "one")]
    assert names(kept, "bob") == [("net", "one")]


def test_what_is_absent_reads_like_what_is_somebody_elses(kept: EditStore) -> None:
    kept.put("alice", "net", "secret-1", b"")
    kept.put("bob", "net", "secret-2", b"")
    kept.put("bob", "other", "secret-3", b"")
    absent = refused(lambda: kept.get("bob", "net", "secret-9"))
    others = refused(lambda: kept.get("bob", "net", "secret-1"))
    assert absent.reason is others.reason is ErrorReason.UNKNOWN_EDITS
    assert absent.message.replace("secret-9", "secret-1") == others.message
    assert others.details == absent.details == {"nearest": "secret-2"}
    assert reason(lambda: kept.delete("bob", "net", "secret-1")) is ErrorReason.UNKNOWN_EDITS
    assert names(kept, "alice") == [("net", "secret-1")]


def test_a_name_that_nothing_is_near_comes_with_those_that_there_are(kept: EditStore) -> None:
    assert "none are stored" in refused(lambda: kept.get("alice", "net", "zzz")).message
    kept.put("alice", "net", "one", b"")
    assert ": one" in refused(lambda: kept.get("alice", "net", "zzz")).message


@pytest.mark.parametrize("text", ["../../x", "/etc/passwd", "a\0b", "é", "", "x" * 5000, "con", ".", ".."])
def test_no_text_of_a_client_becomes_part_of_a_path(kept: EditStore, folder: Path, text: str) -> None:
    kept.put(text, text, text, b"mine")
    assert kept.get(text, text, text).description == b"mine"
    (path,) = files(folder)
    (parent,) = (found for found in folder.iterdir() if found.is_dir())
    assert path.parent == parent
    assert {len(parent.name), len(path.stem)} == {64}
    assert set(parent.name + path.stem) <= set("0123456789abcdef")


def test_two_pairs_that_read_alike_are_two_files(kept: EditStore) -> None:
    for model_id, name in (("a", "b\0c"), ("a\0b", "c"), ("a", "bc"), ("ab", "c"), ("1:a", "b")):
        kept.put("alice", model_id, name, b"")
    assert len(kept.entries("alice")) == 5


def test_only_its_owner_can_enter_the_folder(kept: EditStore, folder: Path) -> None:
    kept.put("alice", "net", "one", b"")
    folders = [folder, *(path for path in folder.iterdir() if path.is_dir())]
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o700, 0o700]


def test_servers_that_share_the_folder_store_one_at_a_time(
    kept: EditStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, content: bytes) -> None:
        with (folder / "lock").open("r+") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_durably(path, content)

    monkeypatch.setattr(owned_files, "write_durably", write)
    kept.put("alice", "net", "one", b"")
    assert names(kept, "alice") == [("net", "one")]


def damage(folder: Path, bent: Callable[[bytes], bytes]) -> None:
    (path,) = files(folder)
    path.write_bytes(bent(path.read_bytes()))


@pytest.mark.parametrize(
    "bent",
    [
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: b"",
        lambda content: content.replace(b"tensors", b"tensorz"),
        lambda content: content.replace(b'"name": "one"', b'"name": "two"'),
    ],
)
def test_a_damaged_file_is_an_error_of_its_own_and_left_out_of_lists(
    kept: EditStore, folder: Path, bent: Callable[[bytes], bytes]
) -> None:
    kept.put("alice", "net", "one", b"description", b"tensors")
    damage(folder, bent)
    kept.put("alice", "net", "fine", b"")
    assert reason(lambda: kept.get("alice", "net", "one")) is ErrorReason.EDITS_CORRUPT
    with capture_logs() as logs:
        assert names(kept, "alice") == [("net", "fine")]
    assert [line["event"] for line in logs] == ["stored edits are damaged"]
    assert reason(lambda: kept.get("alice", "net", "two")) is ErrorReason.UNKNOWN_EDITS


def test_a_damaged_list_can_be_replaced_and_deleted(kept: EditStore, folder: Path) -> None:
    for mend in (
        lambda: kept.put("alice", "net", "one", b"new", is_replacing=True),
        lambda: kept.delete("alice", "net", "one"),
    ):
        kept.put("alice", "net", "one", b"old", is_replacing=True)
        damage(folder, lambda content: content[:9])
        mend()
    assert files(folder) == []


def test_a_whole_file_under_another_lists_name_is_not_that_list(kept: EditStore, folder: Path) -> None:
    kept.put("alice", "net", "one", b"alice")
    (of_alice,) = files(folder)
    kept.put("bob", "net", "one", b"bob")
    of_bob = next(path for path in files(folder) if path != of_alice)
    of_bob.write_bytes(of_alice.read_bytes())
    assert reason(lambda: kept.get("bob", "net", "one")) is ErrorReason.EDITS_CORRUPT
    assert kept.entries("bob") == []


CRASH = """
import os, sys
from pathlib import Path
from trocar_server.edit_store import EditStore
moment = sys.argv[2]
if moment == "before the rename":
    os.replace = lambda *_: os._exit(9)
else:
    sync, seen = os.fsync, []
    def fsync(descriptor):
        seen.append(descriptor)
        if len(seen) == 2:  # that of the folder, after the rename
            os._exit(9)
        sync(descriptor)
    os.fsync = fsync
EditStore(Path(sys.argv[1])).put("alice", "net", "one", b"new", b"x" * 1000, is_replacing=True)
"""


@pytest.mark.parametrize(("moment", "left"), [("before the rename", b"old"), ("after it", b"new")])
def test_a_server_that_dies_while_it_writes_leaves_the_old_list_or_the_new_one(
    kept: EditStore, folder: Path, moment: str, left: bytes
) -> None:
    kept.put("alice", "net", "one", b"old")
    died = warm_python.run([sys.executable, "-c", CRASH, str(folder), moment], check=False)
    assert died.returncode == 9
    after = EditStore(folder)
    assert after.get("alice", "net", "one").description == left
    assert len(after.entries("alice")) == 1


def test_what_a_dead_server_left_is_removed_at_the_next_start(kept: EditStore, folder: Path) -> None:
    kept.put("alice", "net", "one", b"old")
    warm_python.run([sys.executable, "-c", CRASH, str(folder), "before the rename"], check=False)
    assert [path.suffix for path in files(folder)].count(".partial") == 1
    EditStore(folder).clean()
    assert [path.suffix for path in files(folder)] == [".edits"]
    assert kept.get("alice", "net", "one").description == b"old"


def test_a_principal_keeps_no_more_lists_than_allowed(
    kept: EditStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit_store, "MAX_LISTS", 2)
    kept.put("alice", "net", "one", b"")
    kept.put("alice", "other", "two", b"")
    assert reason(lambda: kept.put("alice", "net", "three", b"")) is ErrorReason.REQUEST_TOO_LARGE
    kept.put("alice", "net", "one", b"new", is_replacing=True)
    kept.put("bob", "net", "three", b"")
    kept.delete("alice", "net", "one")
    kept.put("alice", "net", "three", b"")


def test_a_principal_keeps_no_more_bytes_than_allowed(
    kept: EditStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit_store, "MAX_BYTES", 10_000)
    kept.put("alice", "net", "one", b"", bytes(6000))
    assert reason(lambda: kept.put("alice", "net", "two", b"", bytes(4000))) is ErrorReason.REQUEST_TOO_LARGE
    kept.put("alice", "net", "one", b"", bytes(9000), is_replacing=True)
    kept.put("bob", "net", "two", b"", bytes(4000))


def test_all_descriptions_of_a_principal_fit_one_message(
    kept: EditStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit_store, "MAX_DESCRIPTION_BYTES", 100)
    kept.put("alice", "net", "one", bytes(60), bytes(1000))
    assert reason(lambda: kept.put("alice", "net", "two", bytes(41))) is ErrorReason.REQUEST_TOO_LARGE
    kept.put("alice", "net", "two", bytes(40), bytes(1000))


def test_there_is_room_for_so_many_principals_and_who_deletes_all_makes_room(
    kept: EditStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit_store, "MAX_UNPROVEN", 2)
    first, second, third = (hashlib.sha256(token).hexdigest() for token in (b"1", b"2", b"3"))
    kept.put(first, "net", "one", b"")
    kept.put(second, "net", "one", b"")
    assert reason(lambda: kept.put(third, "net", "one", b"")) is ErrorReason.EDITS_UNAVAILABLE
    kept.put(second, "net", "two", b"")
    kept.delete(first, "net", "one")
    kept.put(third, "net", "one", b"")


def test_tokens_that_nobody_checks_keep_out_nobody_with_a_name_or_without_a_token(
    kept: EditStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit_store, "MAX_UNPROVEN", 2)
    for number in range(2):
        kept.put(hashlib.sha256(bytes([number])).hexdigest(), "net", "one", b"")
    for principal in ("alice", "bob", ANONYMOUS):
        kept.put(principal, "net", "one", b"")
    assert [entry.name for entry in kept.entries("alice")] == ["one"]


def test_a_disk_that_takes_nothing_is_said_without_its_paths(kept: EditStore, folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file where the folder should be")
    error = refused(lambda: kept.put("alice", "net", "one", b""))
    assert error.reason is ErrorReason.EDITS_UNAVAILABLE
    assert str(folder.parent) not in error.message


def at_once(count: int, call: Callable[[int], object]) -> list[ErrorReason | None]:
    """Call from so many threads at the same time, each with its number; return why each was refused."""
    barrier = threading.Barrier(count)

    def one(number: int) -> ErrorReason | None:
        barrier.wait()
        try:
            call(number)
        except ServiceError as error:
            return error.reason
        return None

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_of_many_who_store_the_same_name_at_once_one_does(kept: EditStore) -> None:
    found = at_once(8, lambda number: kept.put("alice", "net", "one", str(number).encode()))
    assert sorted(found, key=str) == [*[ErrorReason.EDITS_EXIST] * 7, None]
    assert kept.get("alice", "net", "one").description == str(found.index(None)).encode()


def test_limits_hold_when_many_store_at_once(kept: EditStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_store, "MAX_LISTS", 3)
    found = at_once(8, lambda number: kept.put("alice", "net", str(number), b""))
    assert sorted(found, key=str) == [*[None] * 3, *[ErrorReason.REQUEST_TOO_LARGE] * 5]


def test_a_reader_beside_writers_sees_whole_lists_only(kept: EditStore) -> None:
    def content(number: int) -> bytes:
        return bytes([number]) * 200_000

    kept.put("alice", "net", "one", b"", content(0))

    def write(number: int) -> None:
        for _ in range(10):
            kept.put("alice", "net", "one", b"", content(number), is_replacing=True)

    with ThreadPoolExecutor(3) as pool:
        writers = [pool.submit(write, number) for number in (1, 2)]
        while not all(writer.done() for writer in writers):
            assert len(set(kept.get("alice", "net", "one").tensors)) == 1
            assert len(kept.entries("alice")) == 1
        for writer in writers:
            writer.result()
