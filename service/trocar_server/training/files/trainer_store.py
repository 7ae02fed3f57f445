"""Trainer store: records of a server's trainers on disk, without their weights: owner and spec.

    FOLDER/<trainer id>/trainer.json
    FOLDER/<trainer id>/checkpoint-00000001.json, .safetensors      see `checkpoints`
    FOLDER/~<random>/                                               while a trainer is being deleted

An id is 32 random hex digits: no text of a client becomes part of a path.
"""

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, RLock
from typing import Any

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.errors import TRAINER_MOVED, ServiceError
from trocar_server.storage.disk_errors import disk_errors, storage_error
from trocar_server.storage.durable import DamagedError, make_folder, sync_folder
from trocar_server.storage.sealed_record import Record, read_record, write_record
from trocar_server.training.files.checkpoint_files import PRINCIPAL, numbers_of, read_manifest
from trocar_server.training.files.trainer_janitor import (
    CHECKPOINT_MANIFEST,
    RECORD_NAME,
    TRAINER_ID,
    remove_tree,
)

_KIND = "trainer"
_GONE = (errno.ENOENT, errno.ESTALE)
_log = structlog.get_logger("trocar")


class TrainerRecord(Record):
    """Metadata of a trainer: everything beside its weights."""

    trainer_id: str
    """32 hex digits."""
    principal: str
    """Its owner."""
    created_at_s: float
    """Seconds since 1970."""
    spec: dict[str, Any]
    """Its `TrainerSpec` as JSON."""
    base_model_id: str
    """Id of its base model."""
    base_sha256: str
    """The `fingerprint` of that model's weights."""
    facts: dict[str, Any]
    """Other facts needed after a restart that are independent of the weights: a fit's spec, whether it is
    paused. Facts that belong to the weights go into checkpoints, as `attached`."""
    last_number: int = 0
    """The highest checkpoint number assigned so far, even if that checkpoint is deleted."""


@dataclass(frozen=True)
class UnreadableTrainer:
    """A trainer on disk that cannot be restored."""

    trainer_id: str
    """32 hex digits."""
    principal: str | None
    """Its owner; None if unknown."""
    error: ServiceError
    """The error of calls that need it: why, and what to do."""
    record: TrainerRecord | None = None
    """Its record, if readable."""


class TrainerStore:
    """Stores the records of trainers.

        store = TrainerStore(data_dir / "trainers")
        store.create(uuid.uuid4().hex, "alice", spec.model_dump(mode="json"), "resnet18", fingerprint(state))
        for record in store.entries():                  # after a restart
            check_base(record, fingerprint(state))

    Every method may block on the disk: not for the event loop. All are thread-safe. Once a method returns,
    its changes survive a crash; if it raises, nothing has changed.

    Args:
        folder: The folder; only this process writes there, see `trainer_storage`.
        clock: Returns the seconds since 1970.
        is_shared: Whether other servers may take trainers over, see `owner_folders`.
    """

    def __init__(
        self, folder: Path, clock: Callable[[], float] = time.time, *, is_shared: bool = False
    ) -> None:
        self._folder = folder
        self._clock = clock
        self.is_shared = is_shared
        self._lock = Lock()
        self._locks: dict[str, RLock] = {}

    def create(
        self,
        trainer_id: str,
        principal: str,
        spec: Mapping[str, Any],
        base_model_id: str,
        base_sha256: str,
        facts: Mapping[str, Any] | None = None,
    ) -> TrainerRecord:
        """Add a trainer.

        Raises:
            ServiceError: `STORAGE_FULL` or `STORAGE_UNAVAILABLE`; `TRAINER_INVALID` if it is too large.
        """
        record = TrainerRecord(
            trainer_id=trainer_id,
            principal=principal,
            created_at_s=self._clock(),
            spec=dict(spec),
            base_model_id=base_model_id,
            base_sha256=base_sha256,
            facts=dict(facts or {}),
        )
        folder = self._path(trainer_id)
        with self.locked(trainer_id), disk_errors("trainer"):
            make_folder(self._folder)
            os.mkdir(folder, 0o700)  # noqa: PTH102 - as in `durable`
            try:
                sync_folder(self._folder)
                write_record(folder / RECORD_NAME, _KIND, record)
            except BaseException:
                with contextlib.suppress(OSError):
                    remove_tree(folder)
                raise
        return record

    def get(self, trainer_id: str) -> TrainerRecord:
        """Return one record.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`; `TRAINER_BROKEN` when the file is damaged,
                `STORAGE_UNAVAILABLE` when it cannot be read.
        """
        with disk_errors("trainer"):
            try:
                return self._read(trainer_id)
            except FileNotFoundError:
                raise moved() if self.is_shared else _unknown() from None
            except DamagedError as error:
                raise ServiceError(
                    ErrorReason.TRAINER_BROKEN,
                    f"the description of the trainer is damaged: {error}; delete it and create it again",
                ) from None

    def entries(self) -> list[TrainerRecord]:
        """Return all readable records, the oldest trainer first.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        return self.survey()[0]

    def survey(self) -> tuple[list[TrainerRecord], list[UnreadableTrainer]]:
        """Return all readable records, the oldest trainer first, and the trainers with unreadable records.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`, the folder cannot be read.
        """
        result, unreadable = [], []
        for trainer_id in sorted(self.ids()):
            one = self.look_at(trainer_id)
            if isinstance(one, UnreadableTrainer):
                unreadable.append(one)
            elif one is not None:
                result.append(one)
        return sorted(result, key=lambda record: (record.created_at_s, record.trainer_id)), unreadable

    def look_at(self, trainer_id: str) -> TrainerRecord | UnreadableTrainer | None:
        """Return a trainer's record, or why it cannot be read; None while it is created or deleted."""
        try:
            return self._read(trainer_id)
        except FileNotFoundError:
            if not self._has_checkpoints(trainer_id):
                return None
            error = damaged_record("it is gone")
        except DamagedError as problem:
            error = damaged_record(str(problem))
        except OSError as problem:
            error = storage_error("description of a trainer", problem)
        _log.warning("a trainer cannot be read", trainer_id=trainer_id, problem=error.message)
        return self._unreadable(trainer_id, error)

    def _has_checkpoints(self, trainer_id: str) -> bool:
        try:
            return bool(numbers_of(self._path(trainer_id), CHECKPOINT_MANIFEST))
        except FileNotFoundError:  # its folder has gone meanwhile
            return False
        except OSError:
            return True  # assumed, since it cannot be checked

    def _unreadable(self, trainer_id: str, error: ServiceError) -> UnreadableTrainer:
        """Find the owner of a trainer: its checkpoints name it, too."""
        folder = self._path(trainer_id)
        with contextlib.suppress(OSError):
            for number in reversed(numbers_of(folder, CHECKPOINT_MANIFEST)):
                with contextlib.suppress(OSError, DamagedError):
                    owner = read_manifest(folder, trainer_id, number).attached.get(PRINCIPAL)
                    if isinstance(owner, str):
                        return UnreadableTrainer(trainer_id, owner, error)
        return UnreadableTrainer(trainer_id, None, error)

    def ids(self) -> set[str]:
        """Return the ids of all trainers on disk, damaged ones included.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        with disk_errors("trainer"):
            paths = self._folder.iterdir() if self._folder.is_dir() else ()
            return {path.name for path in paths if TRAINER_ID.fullmatch(path.name)}

    def update(self, trainer_id: str, facts: Mapping[str, Any]) -> TrainerRecord:
        """Replace a trainer's facts.

        Raises:
            ServiceError: As `create` and `get`.
        """
        return self._replace(trainer_id, facts=dict(facts))

    def use_up_numbers(self, trainer_id: str, last_number: int) -> None:
        """Mark the checkpoint numbers up to `last_number` as used, so that none is reused.

        Raises:
            ServiceError: As `create` and `get`.
        """
        with self.locked(trainer_id):
            if last_number > self.get(trainer_id).last_number:
                self._replace(trainer_id, last_number=last_number)

    def delete(self, trainer_id: str) -> None:
        """Delete a trainer with its checkpoints, damaged or not.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`, `STORAGE_UNAVAILABLE`.
        """
        folder, deleted = self._path(trainer_id), self._folder / f"~{uuid.uuid4().hex}"
        with self.locked(trainer_id), disk_errors("trainer"):
            try:
                os.rename(folder, deleted)  # noqa: PTH104 - from here on it is deleted, even after a crash
            except FileNotFoundError:
                raise _unknown() from None
            sync_folder(self._folder)
            with contextlib.suppress(OSError):  # left for the janitor
                remove_tree(deleted)
        with self._lock:
            self._locks.pop(trainer_id, None)

    def folder_of(self, trainer_id: str) -> Path:
        """Return the folder of an existing trainer.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`.
        """
        folder = self._path(trainer_id)
        if not (folder / RECORD_NAME).exists():
            raise moved() if self.is_shared else _unknown()
        return folder

    def path_of(self, trainer_id: str) -> Path:
        """Return the path of a trainer's folder, which may be gone."""
        return self._path(trainer_id)

    def is_here(self, trainer_id: str) -> bool:
        """Whether a trainer is still in this store; its record is only missing if another server has it."""
        return not self.is_shared or (self._path(trainer_id) / RECORD_NAME).exists()

    @contextlib.contextmanager
    def writing(self, trainer_id: str, subject: str) -> Iterator[Path]:
        """Lock a trainer's folder for writing, and yield it.

        Args:
            trainer_id: The trainer.
            subject: What is written, for messages.

        Raises:
            ServiceError: `STORAGE_FULL`, `STORAGE_UNAVAILABLE`; `UNKNOWN_TRAINER`, with the detail
                `TRAINER_MOVED`, if another server has taken the trainer over, see Note: [Fence by removal].
        """
        folder = self._path(trainer_id)
        with self.locked(trainer_id), disk_errors(subject):
            try:
                yield folder
            except OSError as error:
                if self.is_shared and error.errno in _GONE and not folder.is_dir():
                    raise moved() from error
                raise

    def locked(self, trainer_id: str) -> RLock:
        """Return the lock for writing into a trainer's folder."""
        with self._lock:
            return self._locks.setdefault(trainer_id, RLock())

    def _replace(self, trainer_id: str, **changes: Any) -> TrainerRecord:
        with self.writing(trainer_id, "trainer") as folder:
            record = self.get(trainer_id).model_copy(update=changes)
            write_record(folder / RECORD_NAME, _KIND, record)
            return record

    def _read(self, trainer_id: str) -> TrainerRecord:
        record = read_record(self._path(trainer_id) / RECORD_NAME, _KIND, TrainerRecord)
        if record.trainer_id != trainer_id:
            raise DamagedError("it belongs to another trainer")
        return record

    def _path(self, trainer_id: str) -> Path:
        if not TRAINER_ID.fullmatch(trainer_id):
            raise _unknown()
        return self._folder / trainer_id


def damaged_record(problem: str) -> ServiceError:
    """Build the error for a trainer whose record is damaged."""
    return ServiceError(
        ErrorReason.CHECKPOINT_CORRUPT,
        f"the description of the trainer on the server's disk is damaged: {problem}; its checkpoints still "
        "exist. Ask the operator to restore trainer.json from a backup, or close the trainer, which "
        "deletes it",
    )


def check_base(record: TrainerRecord, base_sha256: str) -> None:
    """Refuse to restore a trainer on a base model with other weights than its own.

    Raises:
        ServiceError: `MODEL_CONFLICT`.
    """
    if record.base_sha256 != base_sha256:
        raise ServiceError(
            ErrorReason.MODEL_CONFLICT,
            f"the weights of model '{record.base_model_id}' are not those that the trainer was created "
            "from; host "
            "the model with its old weights, or create a new trainer",
        )


def moved() -> ServiceError:
    """Build the error for a trainer that is at another server of the cluster."""
    return ServiceError(
        ErrorReason.UNKNOWN_TRAINER,
        "the trainer is at another replica of the cluster, or is being moved there; call it through a "
        "gateway",
        **{TRAINER_MOVED: "true"},
    )


def _unknown() -> ServiceError:
    return ServiceError(
        ErrorReason.UNKNOWN_TRAINER, "you have no trainer with this id; list your trainers, or create one"
    )
