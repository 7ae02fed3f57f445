"""Step journal of trainers: the batches of numbered calls since the newest checkpoint, one file each.

    journal = StepJournal(trainers)
    journal.write(trainer_id, 7, JournalEntry(12, "a step", batch))     # before the step runs
    for entry in journal.entries(trainer_id, 7, 10):                    # on another server: run them again
        ...

    FOLDER/<trainer id>/step-<checkpoint>-<number>.safetensors
    FOLDER/<trainer id>/step-<checkpoint>-<number>.attempts     a byte for each attempt to run it again

An entry belongs to the checkpoint that it follows, whose number is never used again: after a checkpoint, or
a restore, which is followed by one, the entries of earlier ones count no more.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from torch import Tensor

from trocar_server.storage.disk_errors import disk_errors
from trocar_server.storage.durable import DamagedError, remove_quietly, write_durably
from trocar_server.storage.tensor_file import lay_out, read_tensor_file
from trocar_server.training.files.trainer_janitor import JOURNAL_ENTRY
from trocar_server.training.files.trainer_store import TrainerStore
from trocar_server.training.losses.batch import Batch
from trocar_server.training.step.trainer_state import pack, unpack

_CALL, _SHA256 = "trocar.call", "trocar.sha256"
_log = structlog.get_logger("trocar")


@dataclass(frozen=True, eq=False)
class JournalEntry:
    """One numbered call.

    Attributes:
        number: Its number.
        kind: Its kind.
        batch: Its batch; None for an update alone.
        byte_count: Bytes of the batch, as read.
    """

    number: int
    kind: str
    batch: Batch | None = None
    byte_count: int = 0


class StepJournal:
    """Stores the journals of trainers. Every method may block on the disk; thread-safe, as `TrainerStore`.

    Args:
        trainers: The store of the trainers' records.
    """

    def __init__(self, trainers: TrainerStore) -> None:
        self._trainers = trainers

    def write(self, trainer_id: str, checkpoint: int, entry: JournalEntry) -> int:
        """Write an entry durably; returns its bytes.

        Args:
            trainer_id: The trainer.
            checkpoint: Number of its newest checkpoint; 0 before the first.
            entry: The call.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`, another server has taken it over; `STORAGE_FULL`,
                `STORAGE_UNAVAILABLE`; `TRAINER_INVALID`, the batch does not fit a file.
        """
        tensors: dict[str, Tensor] = {}
        call = json.dumps({"number": entry.number, "kind": entry.kind, "batch": _packed(entry, tensors)})
        digest = _digest(tensors, call)
        layout = lay_out(tensors, {_CALL: call, _SHA256: digest})
        with self._trainers.writing(trainer_id, "journal of steps") as folder:
            write_durably(_path(folder, checkpoint, entry.number), layout.pieces())
        return layout.byte_count

    def discard(self, trainer_id: str, checkpoint: int, number: int) -> None:
        """Remove the entry of a call that failed, and so changed nothing.

        Raises:
            ServiceError: As `write`.
        """
        with self._trainers.writing(trainer_id, "journal of steps") as folder:
            os.unlink(_path(folder, checkpoint, number))  # noqa: PTH108 - as in `durable`

    def keep_only(self, trainer_id: str, checkpoint: int) -> None:
        """Remove the entries of other checkpoints, as far as the disk lets us."""
        with contextlib.suppress(OSError):
            folder = self._trainers.path_of(trainer_id)
            for name in [entry.name for entry in os.scandir(folder)]:
                match = JOURNAL_ENTRY.fullmatch(name)
                if match and int(match[1]) != checkpoint:
                    remove_quietly(folder / name)

    def begin_attempt(self, trainer_id: str, checkpoint: int, number: int) -> int:
        """Count, durably, an attempt to run an entry again; returns the number of those before.

        Of these, each has ended its process: other attempts call `end_attempts`.

        Raises:
            ServiceError: As `write`.
        """
        with self._trainers.writing(trainer_id, "journal of steps") as folder:
            path = _attempts_path(folder, checkpoint, number)
            count = path.stat().st_size if path.exists() else 0
            write_durably(path, bytes(count + 1))
        return count

    def end_attempts(self, trainer_id: str, checkpoint: int, number: int) -> None:
        """Forget the attempts to run an entry again, as far as the disk lets us."""
        remove_quietly(_attempts_path(self._trainers.path_of(trainer_id), checkpoint, number))

    def has(self, trainer_id: str, checkpoint: int, number: int) -> bool:
        """Whether there is an entry, damaged or not."""
        return _path(self._trainers.path_of(trainer_id), checkpoint, number).exists()

    def entries(self, trainer_id: str, checkpoint: int, first_number: int) -> Iterator[JournalEntry]:
        """Yield the entries after a checkpoint, in order; a damaged one is logged, and is the end.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        number, folder = first_number, self._trainers.path_of(trainer_id)
        while (path := _path(folder, checkpoint, number)).exists():
            try:
                with disk_errors("journal of steps"):
                    yield _read(path, number)
            except DamagedError as error:
                _log.warning("a journal is damaged", trainer_id=trainer_id, number=number, problem=str(error))
                return
            number += 1


def _path(folder: Path, checkpoint: int, number: int) -> Path:
    return folder / f"step-{checkpoint:08}-{number:08}.safetensors"


def _attempts_path(folder: Path, checkpoint: int, number: int) -> Path:
    return _path(folder, checkpoint, number).with_suffix(".attempts")


def _packed(entry: JournalEntry, tensors: dict[str, Tensor]) -> Any:
    batch = entry.batch
    if batch is None:
        return None
    return pack(
        [batch.args, batch.kwargs, list(batch.targets), list(batch.targets.values()), batch.size],
        "batch",
        tensors,
    )


def _digest(tensors: dict[str, Tensor], call: str) -> str:
    """Return the sha256 of a file without it."""
    digest = hashlib.sha256()
    for piece in lay_out(tensors, {_CALL: call}).pieces():
        digest.update(piece)
    return digest.hexdigest()


def _read(path: Path, number: int) -> JournalEntry:
    content = read_tensor_file(path)
    try:
        text, digest = content.metadata[_CALL], content.metadata[_SHA256]
        call = json.loads(text)
        result, kind, packed = int(call["number"]), str(call["kind"]), call["batch"]
    except (KeyError, ValueError, TypeError, RecursionError):
        raise DamagedError("it does not say which call it is") from None
    if result != number or _digest(content.tensors, text) != digest:
        raise DamagedError("its sha256 does not match")
    if packed is None:
        return JournalEntry(number, kind)
    args, kwargs, names, targets, size = unpack(packed, content.tensors)
    batch = Batch(args, kwargs, dict(zip(names, targets, strict=True)), size)
    return JournalEntry(number, kind, batch, sum(tensor.nbytes for tensor in content.tensors.values()))
