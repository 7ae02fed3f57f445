"""Journals of steps: bit-equal, in order, each entry whole or not there."""

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.training.stores import (
    DTYPES,
    ID,
    SPEC,
    bits,
    count_operations,
    fuse,
    opened,
    random_tensor,
    tree,
    with_trainer,
)
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.files.step_journal import JournalEntry, StepJournal
from trocar_server.training.files.trainer_storage import TrainingStorage
from trocar_server.training.files.trainer_store import TrainerStore
from trocar_server.training.losses.batch import Batch


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[TrainingStorage]:
    with opened(tmp_path / "data") as storage:
        with_trainer(storage)
        yield storage


@pytest.fixture
def journal(storage: TrainingStorage) -> StepJournal:
    return storage.journal


def batch_of(seed: int) -> Batch:
    values = [random_tensor((2, 3), dtype, seed) for dtype in (*DTYPES, torch.complex128)]
    values.append(values[-1].conj())  # a view, as of a model's inputs
    kwargs = {"mask": random_tensor((2,), torch.bool, seed), "scale": 0.1, "names": ["a", None]}
    return Batch((values, values[0].t()), kwargs, {"": values[7], "other": values[1]}, size=2)


def write(journal: StepJournal, *numbers: int, checkpoint: int = 0) -> None:
    for number in numbers:
        journal.write(ID, checkpoint, JournalEntry(number, f"call {number}", batch_of(number)))


def read(journal: StepJournal, checkpoint: int = 0, first_number: int = 0) -> list[JournalEntry]:
    return list(journal.entries(ID, checkpoint, first_number))


def plain(value: Any) -> Any:
    """Replace tensors by what they hold."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, bits(value))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def assert_same(found: JournalEntry, number: int) -> None:
    expected = batch_of(number)
    assert (found.number, found.kind) == (number, f"call {number}")
    assert found.batch is not None
    assert (plain(found.batch.args), plain(found.batch.kwargs)) == (
        plain(expected.args),
        plain(expected.kwargs),
    )
    assert (plain(dict(found.batch.targets)), found.batch.size) == (plain(dict(expected.targets)), 2)


def test_entries_come_back_bit_by_bit_and_in_order(journal: StepJournal) -> None:
    write(journal, 12, 10, 11)
    found = read(journal, first_number=10)
    assert [entry.number for entry in found] == [10, 11, 12]
    for entry in found:
        assert_same(entry, entry.number)
        assert entry.byte_count > 0


def test_an_update_alone_has_no_batch(journal: StepJournal) -> None:
    journal.write(ID, 3, JournalEntry(0, "an update"))
    (found,) = read(journal, checkpoint=3)
    assert (found.number, found.kind, found.batch, found.byte_count) == (0, "an update", None, 0)


def test_the_bytes_of_a_file_are_told(journal: StepJournal, tmp_path: Path) -> None:
    count = journal.write(ID, 0, JournalEntry(0, "a step", batch_of(0)))
    (path,) = (tmp_path / "data" / "trainers" / ID).glob("step-*")
    assert path.stat().st_size == count


def test_a_gap_is_the_end(journal: StepJournal) -> None:
    write(journal, 0, 1, 3)
    assert [entry.number for entry in read(journal)] == [0, 1]


def test_entries_belong_to_their_checkpoint(journal: StepJournal) -> None:
    write(journal, 0, 1)
    write(journal, 2, 3, checkpoint=1)
    assert [entry.number for entry in read(journal, 1, 2)] == [2, 3]
    journal.keep_only(ID, 1)
    assert read(journal) == []
    assert [entry.number for entry in read(journal, 1, 2)] == [2, 3]


def test_a_call_that_failed_is_not_repeated(journal: StepJournal) -> None:
    write(journal, 0, 1)
    journal.discard(ID, 0, 1)
    assert [entry.number for entry in read(journal)] == [0]
    with pytest.raises(ServiceError) as error:
        journal.discard(ID, 0, 1)
    assert error.value.reason is ErrorReason.STORAGE_UNAVAILABLE


def test_attempts_of_processes_that_ended_in_them_are_counted(
    storage: TrainingStorage, journal: StepJournal
) -> None:
    write(journal, 0, 1)
    assert [journal.begin_attempt(ID, 0, 1) for _ in range(3)] == [0, 1, 2]
    assert journal.begin_attempt(ID, 0, 0) == 0  # of another entry
    assert [entry.number for entry in read(journal)] == [0, 1]
    journal.end_attempts(ID, 0, 1)
    journal.end_attempts(ID, 0, 1)
    assert journal.begin_attempt(ID, 0, 1) == 0
    journal.keep_only(ID, 1)
    assert (journal.begin_attempt(ID, 0, 1), journal.begin_attempt(ID, 0, 0)) == (0, 0)
    storage.trainers.delete(ID)
    assert not list(storage.trainers.path_of(ID).parent.glob("~*"))


@pytest.mark.parametrize("kind", ["cut", "bit", "header", "another's", "empty", "link"])
def test_a_damaged_entry_is_the_end(journal: StepJournal, tmp_path: Path, kind: str) -> None:
    write(journal, 0, 1, 2)
    first, path, _ = sorted((tmp_path / "data" / "trainers" / ID).glob("step-*"))
    content = bytearray(path.read_bytes())
    if kind == "another's":
        shutil.copy(first, path)
    elif kind == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        content[-1 if kind == "bit" else 20] ^= 1
        path.write_bytes(bytes({"cut": content[:-1], "empty": b""}.get(kind, content)))
    assert [entry.number for entry in read(journal)] == [0]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_entry_is_whole_or_not_there_whatever_operation_fails(
    storage: TrainingStorage, tmp_path: Path, code: int
) -> None:
    journal = storage.journal
    write(journal, 0)
    before = tree(tmp_path / "data")

    def fail(name: str, arguments: tuple[Any, ...]) -> None:
        raise OSError(code, name)

    count = count_operations(lambda: write(journal, 1))
    journal.discard(ID, 0, 1)
    assert count > 3
    for at in range(count):
        with fuse(at, fail), pytest.raises(ServiceError):
            write(journal, 1)
        found = [entry.number for entry in read(journal)]
        assert found in ([0], [0, 1]), at
        if found == [0, 1]:  # the last flush failed, after the name was there
            journal.discard(ID, 0, 1)
        assert tree(tmp_path / "data") == before


def test_a_trainer_that_was_taken_over_takes_no_entry(tmp_path: Path) -> None:
    shared = TrainerStore(tmp_path / "replica-a", is_shared=True)
    shared.create(ID, "alice", SPEC, "resnet18", "")
    (tmp_path / "replica-a" / ID).rename(tmp_path / "elsewhere")
    with pytest.raises(ServiceError, match="at another replica") as error:
        StepJournal(shared).write(ID, 0, JournalEntry(0, "a step", batch_of(0)))
    assert error.value.reason is ErrorReason.UNKNOWN_TRAINER
    assert not (tmp_path / "replica-a" / ID).exists()
