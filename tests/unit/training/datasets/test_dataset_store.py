"""Stored data sets: durable, each its principal's own, limited, every content once, never half a shard."""

import errno
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.support.servers import warm_python
from tests.support.wire.shards import image_shard, manifest_of, png, send, shard_of, upload
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.datasets import (
    DatasetLibrary,
    DatasetStore,
    IncomingShard,
    Manifest,
    Shard,
    TargetSignature,
    dataset_records,
    upload_checks,
)
from trocar_server.training.datasets import dataset_store as store_module

X = np.arange(24, dtype=np.float32).reshape(6, 4)
Y = np.array([0, 1, 2, 0, 1, 7])
FIRST = shard_of(inputs=X[:4], targets=Y[:4])
SECOND = shard_of(inputs=X[4:], targets=Y[4:])
BOTH = ((FIRST, 4), (SECOND, 2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data" / "datasets"


@pytest.fixture
def kept(folder: Path) -> DatasetStore:
    return made(folder)


def made(folder: Path, **options: Any) -> DatasetStore:
    return DatasetStore(folder, **{"max_bytes": 1 << 20, "max_pixels": 10_000, **options})


def reason(call: Callable[[], object]) -> ErrorReason:
    with pytest.raises(ServiceError) as caught:
        call()
    return caught.value.reason


def files(folder: Path) -> set[str]:
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return found - {"lock"}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_data_set_survives_a_restart(kept: DatasetStore, folder: Path) -> None:
    dataset_id = upload(kept, "alice", *BOTH, categories="abcdefgh")
    info = made(folder).get("alice", dataset_id)
    assert (info.dataset_id, info.name, info.sample_count) == (dataset_id, "digits", 6)
    assert info.byte_count == len(FIRST) + len(SECOND) == made(folder).byte_count("alice")
    assert info.is_complete
    assert info.signature is not None
    assert info.signature.targets == {"": TargetSignature("int64", (), 0, 7, (0, 1, 2, 7))}
    assert info.class_count() == 8
    assert made(folder).entries("alice") == [info]


def test_an_upload_goes_on_where_it_was(kept: DatasetStore, folder: Path) -> None:
    begun = kept.begin("alice", manifest_of(*BOTH))
    assert begun.missing == (0, 1)
    send(kept, "alice", begun.dataset_id, SECOND)
    again = made(folder).begin("alice", manifest_of(*BOTH))
    assert again == store_module.Upload(begun.dataset_id, (0,))
    assert reason(lambda: kept.commit("alice", begun.dataset_id)) is ErrorReason.DATASET_INVALID
    assert not kept.get("alice", begun.dataset_id).is_complete
    assert reason(lambda: kept.shards("alice", begun.dataset_id)) is ErrorReason.DATASET_INVALID


def test_the_same_data_set_again_is_the_same_and_nothing_is_sent(kept: DatasetStore) -> None:
    dataset_id = upload(kept, "alice", *BOTH)
    assert kept.begin("alice", manifest_of(*BOTH)) == store_module.Upload(dataset_id, ())
    assert kept.commit("alice", dataset_id) == kept.get("alice", dataset_id)


def test_another_name_is_another_data_set_of_the_same_bytes(kept: DatasetStore) -> None:
    first = upload(kept, "alice", *BOTH)
    begun = kept.begin("alice", manifest_of(*BOTH, name="other"))
    assert begun.missing == ()
    assert begun.dataset_id != first
    assert kept.byte_count("alice") == len(FIRST) + len(SECOND)


def test_equal_shards_of_one_data_set_are_sent_once(kept: DatasetStore) -> None:
    begun = kept.begin("alice", manifest_of((FIRST, 4), (FIRST, 4)))
    assert begun.missing == (0,)
    send(kept, "alice", begun.dataset_id, FIRST)
    assert kept.commit("alice", begun.dataset_id).sample_count == 8


def test_what_somebody_else_has_is_to_be_sent_all_the_same_and_is_one_file(
    kept: DatasetStore, folder: Path
) -> None:
    upload(kept, "alice", *BOTH)
    assert kept.begin("bob", manifest_of(*BOTH)).missing == (0, 1)
    upload(kept, "bob", *BOTH)
    own = sorted(folder.glob(f"owners/*/shards/{digest(FIRST)}"))
    assert len({path.stat().st_ino for path in own}) == 1
    assert own[0].stat().st_nlink == 3


def test_nobody_sees_or_touches_what_is_not_his(kept: DatasetStore) -> None:
    theirs = upload(kept, "alice", *BOTH)
    assert kept.entries("bob") == []
    assert kept.byte_count("bob") == 0
    for call in (kept.get, kept.delete, kept.commit, kept.shards):
        found = {}
        for name, dataset_id in (("theirs", theirs), ("nobodys", "0" * 32), ("odd", "../../x"), ("", "")):
            with pytest.raises(ServiceError) as caught:
                call("bob", dataset_id)
            found[name] = (caught.value.reason, caught.value.message.replace(f"'{dataset_id}'", "ID"))
        assert len(set(found.values())) == 1
        assert found["theirs"][0] is ErrorReason.UNKNOWN_DATASET
    assert reason(lambda: kept.receive("bob", theirs, digest(FIRST))) is ErrorReason.UNKNOWN_DATASET
    assert kept.get("alice", theirs).is_complete


def test_deleting_removes_what_nothing_else_uses(kept: DatasetStore, folder: Path) -> None:
    mine = upload(kept, "alice", *BOTH)
    other = upload(kept, "alice", (FIRST, 4))
    theirs = upload(kept, "bob", (SECOND, 2))
    kept.delete("alice", mine)
    assert {name.rpartition("/")[2] for name in files(folder / "pool")} == {digest(FIRST), digest(SECOND)}
    assert sorted(path.name for path in folder.glob("owners/*/shards/*")) == sorted(
        [digest(FIRST), digest(SECOND)]
    )
    kept.delete("alice", other)
    kept.delete("bob", theirs)
    assert files(folder) == set()
    assert list((folder / "owners").iterdir()) == []
    assert reason(lambda: kept.delete("alice", mine)) is ErrorReason.UNKNOWN_DATASET


def test_an_upload_goes_on_after_another_data_set_was_deleted(kept: DatasetStore) -> None:
    old = upload(kept, "alice", (FIRST, 4))
    manifest = manifest_of((SECOND, 2))
    begun = kept.begin("alice", manifest)
    kept.delete("alice", old)
    send(kept, "alice", begun.dataset_id, SECOND)
    assert kept.commit("alice", begun.dataset_id).is_complete


def test_servers_that_share_the_folder_change_it_one_at_a_time(
    kept: DatasetStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one that starts would take the folder of a caller's first upload for an empty one."""
    seen = []

    def late(path: Path, record: Any) -> None:
        with (folder / "lock").open("r+") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append(path)
        dataset_records.write_record(path, record)

    monkeypatch.setattr(store_module, "write_record", late)
    upload(kept, "alice", *BOTH)
    assert len(seen) == 2


def test_the_limit_counts_uploads_and_equal_bytes_once(folder: Path) -> None:
    kept = made(folder, max_bytes=len(FIRST) + len(SECOND))
    begun = kept.begin("alice", manifest_of((FIRST, 4)))
    kept.begin("alice", manifest_of(*BOTH))
    third = shard_of(inputs=X, targets=Y)
    assert reason(lambda: kept.begin("alice", manifest_of((third, 6)))) is ErrorReason.QUOTA_EXCEEDED
    kept.begin("bob", manifest_of((third, 6))) if len(third) <= kept.max_bytes else None
    kept.delete("alice", begun.dataset_id)
    assert kept.byte_count("alice") == kept.max_bytes


def test_a_caller_has_so_many_data_sets(kept: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_DATASETS", 2)
    for name in "ab":
        kept.begin("alice", manifest_of(*BOTH, name=name))
    assert reason(lambda: kept.begin("alice", manifest_of(*BOTH, name="c"))) is ErrorReason.QUOTA_EXCEEDED
    kept.begin("alice", manifest_of(*BOTH, name="a"))


def test_only_so_many_shards_of_a_caller_come_in_at_once(kept: DatasetStore, folder: Path) -> None:
    dataset_id = kept.begin("alice", manifest_of(*BOTH)).dataset_id
    incoming = [kept.receive("alice", dataset_id, digest(FIRST)) for _ in range(store_module.MAX_INCOMING)]
    assert reason(lambda: kept.receive("alice", dataset_id, digest(FIRST))) is ErrorReason.SERVER_BUSY
    for one in incoming:
        kept.release("alice", one)
    kept.release("alice", kept.receive("alice", dataset_id, digest(FIRST)))
    assert files(folder / "incoming") == set()


@pytest.mark.parametrize(
    "sent",
    [FIRST[:-1], FIRST + b"\0", FIRST[:-1] + b"\0", b"", SECOND],
    ids=["cut off", "longer", "altered", "nothing", "another"],
)
def test_bytes_that_are_not_as_announced_are_refused(kept: DatasetStore, folder: Path, sent: bytes) -> None:
    dataset_id = kept.begin("alice", manifest_of((FIRST, 4))).dataset_id
    incoming = kept.receive("alice", dataset_id, digest(FIRST))
    before = files(folder) - {f"incoming/{path.name}" for path in (folder / "incoming").iterdir()}
    try:
        assert reason(lambda: written(kept, incoming, dataset_id, sent)) is ErrorReason.DATASET_INVALID
    finally:
        kept.release("alice", incoming)
    assert files(folder) == before
    assert kept.begin("alice", manifest_of((FIRST, 4))).missing == (0,)


def written(kept: DatasetStore, incoming: IncomingShard, dataset_id: str, data: bytes) -> None:
    kept.write(incoming, data)
    kept.keep("alice", dataset_id, incoming)


def test_shards_that_do_not_go_together_make_no_data_set(kept: DatasetStore) -> None:
    other = shard_of(inputs=X[:, :3], targets=Y)
    assert reason(lambda: upload(kept, "alice", (FIRST, 4), (other, 6))) is ErrorReason.DATASET_INVALID


def test_a_wrong_number_of_samples_is_refused(kept: DatasetStore) -> None:
    assert reason(lambda: upload(kept, "alice", (FIRST, 3))) is ErrorReason.DATASET_INVALID


def test_images_are_looked_at_when_they_come(kept: DatasetStore) -> None:
    good = png(np.zeros((5, 4, 3), np.uint8))
    upload(kept, "alice", (image_shard([good, good], targets=Y[:2]), 2))
    for bad in (b"no image", good[:20], png(np.zeros((101, 100, 3), np.uint8))):
        shard = image_shard([good, bad], targets=Y[:2])
        with pytest.raises(ServiceError, match="image 1") as caught:
            upload(kept, "alice", (shard, 2))
        assert caught.value.reason is ErrorReason.DATASET_INVALID


HEX = "0" * 64


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest("", 1, (), (Shard(HEX, 10, 1),)),
        Manifest("a\nb", 1, (), (Shard(HEX, 10, 1),)),
        Manifest("a" * 201, 1, (), (Shard(HEX, 10, 1),)),
        Manifest("a", 1, ("",), (Shard(HEX, 10, 1),)),
        Manifest("a", 0, (), ()),
        Manifest("a", 2, (), (Shard(HEX, 10, 1),)),
        Manifest("a", 1, (), (Shard("../" + HEX[:61], 10, 1),)),
        Manifest("a", 1, (), (Shard("A" * 64, 10, 1),)),
        Manifest("a", 1, (), (Shard(HEX, 0, 1),)),
        Manifest("a", 1, (), (Shard(HEX, 1 << 40, 1),)),
        Manifest("a", 11, (), (Shard(HEX, 10, 11),)),
        Manifest("a", -1, (), (Shard(HEX, 10, -1),)),
        Manifest("a", 2, (), (Shard(HEX, 10, 1), Shard(HEX, 11, 1))),
    ],
)
def test_what_can_be_no_data_set_is_refused_and_leaves_nothing(
    kept: DatasetStore, folder: Path, manifest: Manifest
) -> None:
    assert reason(lambda: kept.begin("alice", manifest)) is ErrorReason.DATASET_INVALID
    assert not folder.exists()


class FailingDisk:
    """Fails one call of the functions that write, counted over all of them."""

    NAMES = ("open", "write", "fsync", "link", "mkdir", "replace")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, code: int) -> None:
        self._number, self._code, self.count, self.is_on = number, code, 0, True
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            is_writing = name != "open" or bool(args[1] & os.O_CREAT)
            is_writing &= name != "mkdir" or not os.path.isdir(args[0])  # noqa: PTH112 - that calls none of ours
            if self.is_on and is_writing:
                self.count += 1
                if self.count == self._number:
                    raise OSError(self._code, os.strerror(self._code))
            return real(*args, **options)

        return call


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_write_leaves_what_was_there(folder: Path, code: int) -> None:
    expected = ErrorReason.STORAGE_FULL if code == errno.ENOSPC else ErrorReason.STORAGE_UNAVAILABLE
    failures = 0
    for number in range(1, 200):
        place = folder / str(number)
        kept = made(place)
        upload(kept, "bob", (SECOND, 2))
        theirs = files(place)
        with pytest.MonkeyPatch.context() as monkeypatch, capture_logs():
            disk = FailingDisk(monkeypatch, number, code)
            found = upload_reason(kept)
            assert found in (None, expected)
            failures += found is not None
            disk.is_on = False
            assert files(place / "incoming") == set()
            assert not [name for name in files(place) if name.endswith(".partial")]
            for info in kept.entries("alice"):
                kept.delete("alice", info.dataset_id)
            kept.clean()
            assert files(place) == theirs
            assert reader_sum(kept, "alice", upload(kept, "alice", *BOTH)) == X.sum()
        if disk.count < number:
            assert failures == disk.count > 15
            return
    pytest.fail("the last write was not reached")


def upload_reason(kept: DatasetStore) -> ErrorReason | None:
    try:
        upload(kept, "alice", *BOTH)
    except ServiceError as error:
        return error.reason
    return None


def reader_sum(kept: DatasetStore, principal: str, dataset_id: str) -> float:
    reader = DatasetLibrary(kept, {}, 10_000).open(principal, dataset_id)
    try:
        return float(reader.arrays(range(len(reader)))["inputs"].sum())
    finally:
        reader.close()


@pytest.mark.parametrize("damage", ["altered", "cut off", "gone"])
def test_a_damaged_shard_is_said_and_mended_by_another_upload(
    kept: DatasetStore, folder: Path, damage: str
) -> None:
    dataset_id = upload(kept, "alice", *BOTH)
    for path in (*folder.glob(f"owners/*/shards/{digest(SECOND)}"), folder / "pool" / digest(SECOND)):
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(SECOND[:-1] + (b"\xff" if damage == "altered" else b""))
    with capture_logs():
        assert reason(lambda: reader_sum(kept, "alice", dataset_id)) is ErrorReason.DATASET_CORRUPT
    begun = kept.begin("alice", manifest_of(*BOTH))
    assert begun == store_module.Upload(dataset_id, (1,))
    send(kept, "alice", dataset_id, SECOND)
    assert reader_sum(kept, "alice", dataset_id) == X.sum()


def test_a_damaged_pool_does_not_reach_others(kept: DatasetStore, folder: Path) -> None:
    upload(kept, "alice", (FIRST, 4))
    (folder / "pool" / digest(FIRST)).write_bytes(FIRST[:-1] + b"\xff")
    assert reader_sum(kept, "bob", upload(kept, "bob", (FIRST, 4))) == X[:4].sum()


def test_a_damaged_record_is_listed_as_such_and_can_be_deleted(kept: DatasetStore, folder: Path) -> None:
    dataset_id = upload(kept, "alice", (FIRST, 4))
    fine = upload(kept, "alice", (SECOND, 2))
    (path,) = folder.glob(f"owners/*/{dataset_id}.dataset")
    path.write_bytes(path.read_bytes()[:-1])
    with capture_logs() as logs:
        first, damaged = kept.entries("alice")
    assert (first.dataset_id, first.problem) == (fine, "")
    assert (damaged.dataset_id, damaged.sample_count, damaged.byte_count) == (dataset_id, 0, 0)
    assert damaged.problem
    assert [line["event"] for line in logs] == ["a stored data set is damaged"]
    assert reason(lambda: kept.get("alice", dataset_id)) is ErrorReason.DATASET_CORRUPT
    kept.clean()
    assert (folder / "pool" / digest(FIRST)).exists()
    kept.delete("alice", dataset_id)
    assert not (folder / "pool" / digest(FIRST)).exists()


def test_an_upload_that_nobody_goes_on_with_ends(folder: Path) -> None:
    begun = made(folder).begin("alice", manifest_of(*BOTH))
    send(made(folder), "alice", begun.dataset_id, FIRST)
    complete = upload(made(folder), "alice", (SECOND, 2))
    (path,) = folder.glob(f"owners/*/{begun.dataset_id}.dataset")
    week = path.stat().st_mtime + 7 * 86_400
    made(folder, clock=lambda: week - 1).clean()
    assert len(made(folder).entries("alice")) == 2
    made(folder, clock=lambda: week + 1).clean()
    assert [info.dataset_id for info in made(folder).entries("alice")] == [complete]
    assert files(folder / "pool") == {digest(SECOND)}


def test_without_hard_links_every_owner_has_his_own_copy(
    kept: DatasetStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    for principal in ("alice", "bob"):
        dataset_id = upload(kept, principal, *BOTH)
        assert reader_sum(kept, principal, dataset_id) == X.sum()
    assert files(folder / "pool") == files(folder / "incoming") == set()


def test_a_content_with_too_many_links_is_stored_again(
    kept: DatasetStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def linked(source: Path, target: Path) -> None:
        if os.stat(source).st_nlink > 2:  # noqa: PTH116
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
        link(source, target)

    monkeypatch.setattr(os, "link", linked)
    for principal in ("alice", "bob", "carol", "dave"):
        assert reader_sum(kept, principal, upload(kept, principal, *BOTH)) == X.sum()
    inodes = {path.stat().st_ino for path in folder.glob("owners/*/shards/*")}
    assert (len(inodes), files(folder / "incoming")) == (4, set())
    assert files(folder / "pool") == {digest(FIRST), digest(SECOND)}


KILLED = """
import hashlib, os, signal, sys
from pathlib import Path
from trocar_server.training.datasets import DatasetStore, Manifest, Shard

folder = Path(sys.argv[1])
data = [Path(name).read_bytes() for name in sys.argv[2:]]
shards = tuple(Shard(hashlib.sha256(part).hexdigest(), len(part), 4 - 2 * i) for i, part in enumerate(data))

def counted(real, number, seen=[]):
    def call(*args, **options):
        seen.append(1)
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    return call

def upload(place, number):
    for name in ("write", "fsync", "link", "unlink", "replace"):
        setattr(os, name, counted(getattr(os, name), number))
    store = DatasetStore(place, 1 << 20, 10_000)
    begun = store.begin("alice", Manifest("digits", 6, (), shards))
    for index in begun.missing:
        incoming = store.receive("alice", begun.dataset_id, shards[index].sha256)
        store.write(incoming, data[index])
        store.keep("alice", begun.dataset_id, incoming)
        store.release("alice", incoming)
        print(number, "kept", index, flush=True)
    store.commit("alice", begun.dataset_id)
    print(number, "committed", flush=True)

for number in range(1, 200):
    child = os.fork()
    if not child:
        upload(folder / str(number), number)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_an_upload_killed_at_any_moment_is_taken_up_again(folder: Path, tmp_path: Path) -> None:
    names = [tmp_path / "first", tmp_path / "second"]
    for path, data in zip(names, (FIRST, SECOND), strict=True):
        path.write_bytes(data)
    folder.mkdir(parents=True)
    command = [sys.executable, "-c", KILLED, str(folder), *map(str, names)]
    result = warm_python.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    places = sorted(folder.iterdir(), key=lambda path: int(path.name))
    assert len(places) > 20
    for place in places:
        kept = made(place)
        kept.clean()
        assert files(place) == set() or files(place / "incoming") == set()
        begun = kept.begin("alice", manifest_of(*BOTH))
        acknowledged = {int(line[2]) for line in lines if line[:2] == [place.name, "kept"]}
        assert acknowledged.isdisjoint(begun.missing)
        if [place.name, "committed"] in lines:
            assert kept.get("alice", begun.dataset_id).is_complete
        assert reader_sum(kept, "alice", upload(kept, "alice", *BOTH)) == X.sum()
        assert {path.name for path in (place / "pool").iterdir()} == {digest(FIRST), digest(SECOND)}


def test_the_record_of_the_largest_manifest_can_be_read() -> None:
    name = len(json.dumps("\U0001f600" * upload_checks.MAX_NAME_CHARACTERS)) + len(", ")
    shard = len(json.dumps({"sha256": "0" * 64, "byte_count": 1 << 40, "sample_count": 1 << 40})) + len(", ")
    largest = (upload_checks.MAX_CATEGORIES + 1) * name + upload_checks.MAX_SHARDS * shard
    assert largest < dataset_records.MAX_RECORD_BYTES
