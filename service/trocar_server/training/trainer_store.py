"""The trainers of a server on disk, apart from their weights: whose they are and what they were made of.

    FOLDER/<trainer id>/trainer.json
    FOLDER/<trainer id>/checkpoint-00000001.json, .safetensors      see `checkpoints`
    FOLDER/~<random>/                                               while a trainer is being deleted

An id is 32 random hex digits: no text of a client becomes part of a path.
"""

import contextlib
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock, RLock
from typing import Any

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.durable import DamagedError, disk_errors, make_folder, sync_folder
from trocar_server.errors import ServiceError
from trocar_server.training.janitor import RECORD_NAME, remove_tree
from trocar_server.training.records import Record, read_record, write_record

TRAINER_ID = re.compile(r"[0-9a-f]{32}")
"""How an id looks; `uuid.uuid4().hex` is one."""

_KIND = "trainer"
_log = structlog.get_logger("trocar")


class TrainerRecord(Record):
    """What is known of a trainer beside its weights."""

    trainer_id: str
    """32 hex digits."""
    principal: str
    """Whose it is."""
    created_at_s: float
    """Seconds since 1970."""
    spec: dict[str, Any]
    """Its `TrainerSpec` as JSON."""
    base_model_id: str
    """The model that it began with."""
    base_sha256: str
    """The `fingerprint` of that model's weights."""
    facts: dict[str, Any]
    """Whatever else must be known after a restart and does not belong to one moment of the weights: a fit's
    description, whether it is paused. What does belong to them goes into checkpoints, as `attached`."""
    last_number: int = 0
    """Numbers of checkpoints up to here were given away, though those may be deleted."""


class TrainerStore:
    """Keeps the records of trainers.

        store = TrainerStore(data_dir / "trainers")
        store.create(uuid.uuid4().hex, "alice", spec.model_dump(mode="json"), "resnet18", fingerprint(state))
        for record in store.entries():                  # after a restart
            check_base(record, fingerprint(state))

    Every method may block on the disk: not for the event loop. All are safe to call from several threads.
    What a method has returned from survives a crash; where one raises, what was there still is.

    Args:
        folder: Where; this process alone writes there, see `storage`.
        clock: Returns the seconds since 1970.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
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
            ServiceError: `STORAGE_FULL` or `STORAGE_UNAVAILABLE`; `TRAINER_INVALID` where it is too large.
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
                raise _unknown() from None
            except DamagedError as error:
                raise ServiceError(
                    ErrorReason.TRAINER_BROKEN,
                    f"the description of the trainer is damaged: {error}; delete it and make it again",
                ) from None

    def entries(self) -> list[TrainerRecord]:
        """Return all records, the oldest trainer first; damaged ones are logged and left out.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        found = []
        with disk_errors("trainer"):
            for path in self._folder.iterdir() if self._folder.is_dir() else ():
                if TRAINER_ID.fullmatch(path.name):
                    try:
                        found.append(self._read(path.name))
                    except FileNotFoundError:  # being made, or deleted
                        continue
                    except DamagedError as error:
                        _log.warning("a trainer is damaged", trainer_id=path.name, problem=str(error))
        return sorted(found, key=lambda record: (record.created_at_s, record.trainer_id))

    def ids(self) -> set[str]:
        """Return the ids of all trainers that are there, damaged ones included.

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
        """Take care that no checkpoint gets a number again.

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
                os.rename(folder, deleted)  # noqa: PTH104 - from here on it is gone, whatever happens
            except FileNotFoundError:
                raise _unknown() from None
            sync_folder(self._folder)
            with contextlib.suppress(OSError):  # the janitor will do it
                remove_tree(deleted)
        with self._lock:
            self._locks.pop(trainer_id, None)

    def folder_of(self, trainer_id: str) -> Path:
        """Return the folder of a trainer that is there.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`.
        """
        folder = self._path(trainer_id)
        if not (folder / RECORD_NAME).exists():
            raise _unknown()
        return folder

    def locked(self, trainer_id: str) -> RLock:
        """Return the lock of what writes into a trainer's folder."""
        with self._lock:
            return self._locks.setdefault(trainer_id, RLock())

    def _replace(self, trainer_id: str, **changes: Any) -> TrainerRecord:
        with self.locked(trainer_id), disk_errors("trainer"):
            record = self.get(trainer_id).model_copy(update=changes)
            write_record(self._path(trainer_id) / RECORD_NAME, _KIND, record)
            return record

    def _read(self, trainer_id: str) -> TrainerRecord:
        record = read_record(self._path(trainer_id) / RECORD_NAME, _KIND, TrainerRecord)
        if record.trainer_id != trainer_id:
            raise DamagedError("it is another trainer's")
        return record

    def _path(self, trainer_id: str) -> Path:
        if not TRAINER_ID.fullmatch(trainer_id):
            raise _unknown()
        return self._folder / trainer_id


def check_base(record: TrainerRecord, base_sha256: str) -> None:
    """Refuse to go on with a trainer on other weights than it was made of.

    Raises:
        ServiceError: `MODEL_CONFLICT`.
    """
    if record.base_sha256 != base_sha256:
        raise ServiceError(
            ErrorReason.MODEL_CONFLICT,
            f"the weights of model '{record.base_model_id}' are not those that the trainer was made of; host "
            "the model as it was, or make a new trainer",
        )


def _unknown() -> ServiceError:
    return ServiceError(
        ErrorReason.UNKNOWN_TRAINER, "you have no trainer of this id; list your trainers, or make one"
    )
