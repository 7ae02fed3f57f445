"""Checkpoints of trainers on disk: a safetensors file, and a manifest that is written last.

    checkpoint = store.save(trainer_id, snapshot(core.state()), update_count=500)
    store.load(trainer_id).state

The manifest holds the sha256 of the tensors and all other facts, in a sealed record (`sealed_record`). A
checkpoint exists if its manifest does: an interrupted save leaves no checkpoint.
"""

import errno
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage.disk_errors import disk_errors
from trocar_server.storage.durable import DamagedError, write_durably
from trocar_server.storage.sealed_record import write_record
from trocar_server.storage.tensor_file import lay_out
from trocar_server.training.files.checkpoint_files import (
    KIND,
    SAME,
    Checkpoint,
    CheckpointManifest,
    SavedTrainer,
    damaged_checkpoints,
    data_path,
    hashed,
    manifest_path,
    numbers_of,
    read_checkpoint,
    readable,
    remove_checkpoint,
    undone,
)
from trocar_server.training.files.snapshots import same_memory
from trocar_server.training.files.trainer_janitor import CHECKPOINT_DATA, CHECKPOINT_MANIFEST
from trocar_server.training.files.trainer_store import TrainerStore
from trocar_server.training.step.trainer_state import TrainerState

_log = structlog.get_logger("trocar")


class CheckpointStore:
    """Stores the checkpoints of trainers.

    Every method may block on the disk: not for the event loop. All are thread-safe; writes of one trainer are
    serialised.

    Args:
        trainers: The store of the trainers' records.
        keep: How many requested checkpoints are kept per trainer, the newest ones.
        keep_automatic: How many checkpoints saved by fits are kept; they do not displace requested ones.
        clock: Returns the seconds since 1970.
    """

    def __init__(
        self,
        trainers: TrainerStore,
        keep: int,
        keep_automatic: int = 2,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._trainers = trainers
        self._keep = {False: keep, True: keep_automatic}
        self._clock = clock
        self._last: dict[str, int] = {}

    def save(
        self,
        trainer_id: str,
        state: TrainerState,
        *,
        update_count: int = 0,
        note: str = "",
        is_automatic: bool = False,
        next_number: int = 0,
        request_id: str = "",
        attached: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Write a checkpoint, durably and atomically: if this raises, nothing of it remains.

        Then surplus checkpoints are deleted, oldest first.

        Args:
            trainer_id: The trainer.
            state: A `snapshot`: on the CPU, and not modified meanwhile.
            update_count: Weight updates so far.
            note: Text for people.
            is_automatic: Whether a fit saves it.
            next_number: Number of the trainer's next call.
            request_id: Id of the request for it.
            attached: JSON data of this moment: a fit's state or the last results of steps.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`, `STORAGE_FULL`, `STORAGE_UNAVAILABLE`; `TRAINER_INVALID` if
                the state does not fit a file.
        """
        same = same_memory(state.tensors)
        own = {name: tensor for name, tensor in state.tensors.items() if name not in same}
        layout = lay_out(own, {"format": "pt", SAME: json.dumps(same)})
        with self._trainers.writing(trainer_id, "checkpoint"):
            folder = self._trainers.folder_of(trainer_id)
            number = self._next_number(trainer_id, folder)
            digest = hashlib.sha256()
            with undone(folder, number):
                write_durably(data_path(folder, number), hashed(layout.pieces(), digest))
                checkpoint = Checkpoint(
                    trainer_id=trainer_id,
                    number=number,
                    created_at_s=self._clock(),
                    byte_count=layout.byte_count,
                    sha256=digest.hexdigest(),
                    update_count=update_count,
                    note=note,
                    is_automatic=is_automatic,
                    next_number=next_number,
                    request_id=request_id,
                )
                manifest = CheckpointManifest(
                    checkpoint=checkpoint, facts=state.facts, attached=dict(attached or {})
                )
                write_record(manifest_path(folder, number), KIND, manifest)
            self._drop_old(folder, trainer_id, is_automatic)
        return checkpoint

    def load(self, trainer_id: str, number: int | None = None) -> SavedTrainer:
        """Read a checkpoint.

        Args:
            trainer_id: The trainer.
            number: The checkpoint's number; the latest when None.

        Raises:
            ServiceError: `UNKNOWN_TRAINER` or `UNKNOWN_CHECKPOINT`; `CHECKPOINT_CORRUPT` when it is damaged,
                with the number of the one before, if any, as detail `previous`; `STORAGE_UNAVAILABLE`.
        """
        with disk_errors("checkpoint"):
            folder = self._trainers.folder_of(trainer_id)
            numbers = numbers_of(folder, CHECKPOINT_MANIFEST)
            wanted = max(numbers, default=0) if number is None else number
            if wanted not in numbers:
                raise _unknown(wanted, numbers)
            try:
                return read_checkpoint(folder, trainer_id, wanted)
            except FileNotFoundError:
                if wanted not in numbers_of(folder, CHECKPOINT_MANIFEST):  # dropped meanwhile
                    raise _unknown(wanted, numbers) from None
                raise _corrupt(wanted, numbers, "its tensor file is missing") from None
            except DamagedError as error:
                raise _corrupt(wanted, numbers, str(error)) from None
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                raise _corrupt(wanted, numbers, "the disk cannot read it") from None

    def load_newest(self, trainer_id: str) -> SavedTrainer | None:
        """Read the latest intact checkpoint, for a restart; None if there are no checkpoints.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`, `STORAGE_UNAVAILABLE`; `CHECKPOINT_CORRUPT` if all
                checkpoints are damaged.
        """
        skipped: list[int] = []
        problems: list[str] = []
        number: int | None = None
        with disk_errors("checkpoint"):
            if not numbers_of(self._trainers.folder_of(trainer_id), CHECKPOINT_MANIFEST):
                return None
        while True:
            try:
                saved = self.load(trainer_id, number)
                return replace(saved, skipped=tuple(skipped), problems=tuple(problems))
            except ServiceError as error:
                if error.reason is not ErrorReason.CHECKPOINT_CORRUPT or not error.details["previous"]:
                    raise
                _log.warning("a checkpoint is damaged", trainer_id=trainer_id, problem=error.message)
                skipped.append(int(error.details["number"]))
                problems.append(
                    f"checkpoint {error.details['number']} is damaged: {error.details['problem']}"
                )
                number = int(error.details["previous"])

    def entries(self, trainer_id: str) -> list[Checkpoint]:
        """Return a trainer's checkpoints, oldest first; damaged manifests are logged and left out.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`, `STORAGE_UNAVAILABLE`.
        """
        with disk_errors("checkpoint"):
            return list(readable(self._trainers.folder_of(trainer_id), trainer_id))

    def damaged(self, trainer_id: str) -> list[tuple[int, str]]:
        """Return the numbers of checkpoints that cannot be restored, and why, judged by size and manifest.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`, `STORAGE_UNAVAILABLE`.
        """
        with disk_errors("checkpoint"):
            return list(damaged_checkpoints(self._trainers.folder_of(trainer_id), trainer_id))

    def delete(self, trainer_id: str, number: int) -> None:
        """Delete a checkpoint, damaged or not.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`, `UNKNOWN_CHECKPOINT`, `STORAGE_FULL`, `STORAGE_UNAVAILABLE`.
        """
        with self._trainers.locked(trainer_id), disk_errors("checkpoint"):
            folder = self._trainers.folder_of(trainer_id)
            numbers = numbers_of(folder, CHECKPOINT_MANIFEST)
            if number not in numbers:
                raise _unknown(number, numbers)
            if number == max(numbers):
                self._use_up(trainer_id, number)
            remove_checkpoint(folder, number)

    def _next_number(self, trainer_id: str, folder: Path) -> int:
        used = [*numbers_of(folder, CHECKPOINT_MANIFEST), *numbers_of(folder, CHECKPOINT_DATA)]
        last = self._trainers.get(trainer_id).last_number
        self._last[trainer_id] = max(last, self._last.get(trainer_id, 0), *used, 0) + 1
        return self._last[trainer_id]

    def _use_up(self, trainer_id: str, number: int) -> None:
        self._last[trainer_id] = max(number, self._last.get(trainer_id, 0))
        try:
            self._trainers.use_up_numbers(trainer_id, number)
        except ServiceError as error:
            if error.reason is not ErrorReason.STORAGE_FULL:  # on a full disk, deleting matters more
                raise

    def _drop_old(self, folder: Path, trainer_id: str, is_automatic: bool) -> None:
        """Delete surplus checkpoints of one kind; if the disk fails, the next save tries again."""
        try:
            kind = [one for one in readable(folder, trainer_id) if one.is_automatic is is_automatic]
            for checkpoint in kind[: -self._keep[is_automatic]]:
                remove_checkpoint(folder, checkpoint.number)
        except OSError as error:
            _log.warning(
                "old checkpoints could not be removed", trainer_id=trainer_id, problem=error.strerror
            )


def _unknown(number: int, numbers: list[int]) -> ServiceError:
    available = (
        f"available: {', '.join(map(str, numbers))}" if numbers else "none was saved yet; save one first"
    )
    which = f" {number}" if number else ""
    return ServiceError(ErrorReason.UNKNOWN_CHECKPOINT, f"the trainer has no checkpoint{which}; {available}")


def _corrupt(number: int, numbers: list[int], problem: str) -> ServiceError:
    before = max((other for other in numbers if other < number), default=None)
    advice = f"restore checkpoint {before} instead" if before else "there is no earlier checkpoint"
    return ServiceError(
        ErrorReason.CHECKPOINT_CORRUPT,
        f"checkpoint {number} is damaged: {problem}; {advice}",
        number=str(number),
        problem=problem,
        previous=str(before or ""),
    )
