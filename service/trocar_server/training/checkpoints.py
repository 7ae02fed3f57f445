"""What trainers were at some moment, on disk: a safetensors file, and a manifest that comes last.

    checkpoint = store.save(trainer_id, snapshot(core.state()), update_count=500)
    store.load(trainer_id).state

The manifest holds the sha256 of the tensors and all other facts, under a seal of its own (`records`). A
checkpoint exists when its manifest does: whatever stops a save before, nothing of it counts.
"""

import errno
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.durable import DamagedError, disk_errors, write_durably
from trocar_server.errors import ServiceError
from trocar_server.training.checkpoint_files import (
    KIND,
    SAME,
    Checkpoint,
    Manifest,
    SavedTrainer,
    data_path,
    hashed,
    manifest_path,
    numbers_of,
    read_checkpoint,
    readable,
    remove_checkpoint,
    undone,
)
from trocar_server.training.janitor import CHECKPOINT_DATA, CHECKPOINT_MANIFEST
from trocar_server.training.records import write_record
from trocar_server.training.snapshots import same_memory
from trocar_server.training.state import TrainerState
from trocar_server.training.tensor_file import lay_out
from trocar_server.training.trainer_store import TrainerStore

_log = structlog.get_logger("trocar")


class CheckpointStore:
    """Keeps the checkpoints of trainers.

    Every method may block on the disk: not for the event loop. All are safe to call from several threads; one
    trainer's writes wait for each other.

    Args:
        trainers: Where the trainers are.
        keep: How many of those that were asked for are kept of each trainer, the newest ones.
        keep_automatic: How many of those that fits save; they do not push out the others.
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
        attached: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Write a checkpoint, durably: when this returns it is there, when it raises nothing of it is.

        Then those are dropped that are too many, the oldest first.

        Args:
            trainer_id: Whose.
            state: A `snapshot`: on the CPU, and changed by nobody.
            update_count: Updates of the weights until now.
            note: What to say about it.
            is_automatic: Whether a fit saves it.
            attached: JSON that belongs to this moment, a fit's state or the last results of steps.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`, `STORAGE_FULL`, `STORAGE_UNAVAILABLE`; `TRAINER_INVALID` where
                the state does not fit a file.
        """
        same = same_memory(state.tensors)
        own = {name: tensor for name, tensor in state.tensors.items() if name not in same}
        layout = lay_out(own, {"format": "pt", SAME: json.dumps(same)})
        with self._trainers.locked(trainer_id), disk_errors("checkpoint"):
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
                )
                manifest = Manifest(checkpoint=checkpoint, facts=state.facts, attached=dict(attached or {}))
                write_record(manifest_path(folder, number), KIND, manifest)
            self._drop_old(folder, trainer_id, is_automatic)
        return checkpoint

    def load(self, trainer_id: str, number: int | None = None) -> SavedTrainer:
        """Read a checkpoint.

        Args:
            trainer_id: Whose.
            number: Which; the latest when None.

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
                raise _corrupt(wanted, numbers, "its tensors are gone") from None
            except DamagedError as error:
                raise _corrupt(wanted, numbers, str(error)) from None
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                raise _corrupt(wanted, numbers, "the disk cannot read it") from None

    def load_newest(self, trainer_id: str) -> SavedTrainer | None:
        """Read the latest checkpoint that is whole, for a restart; None where there is none.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`, `STORAGE_UNAVAILABLE`; `CHECKPOINT_CORRUPT` where there are
                checkpoints and all are damaged.
        """
        skipped: list[int] = []
        number: int | None = None
        with disk_errors("checkpoint"):
            if not numbers_of(self._trainers.folder_of(trainer_id), CHECKPOINT_MANIFEST):
                return None
        while True:
            try:
                saved = self.load(trainer_id, number)
                return SavedTrainer(saved.checkpoint, saved.state, saved.attached, tuple(skipped))
            except ServiceError as error:
                if error.reason is not ErrorReason.CHECKPOINT_CORRUPT or not error.details["previous"]:
                    raise
                _log.warning("a checkpoint is damaged", trainer_id=trainer_id, problem=error.message)
                skipped.append(int(error.details["number"]))
                number = int(error.details["previous"])

    def entries(self, trainer_id: str) -> list[Checkpoint]:
        """Return the checkpoints of a trainer, the oldest first; damaged manifests are logged and left out.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`, `STORAGE_UNAVAILABLE`.
        """
        with disk_errors("checkpoint"):
            return list(readable(self._trainers.folder_of(trainer_id), trainer_id))

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
            if error.reason is not ErrorReason.STORAGE_FULL:  # then to delete matters more
                raise

    def _drop_old(self, folder: Path, trainer_id: str, is_automatic: bool) -> None:
        """Drop what is too many of one kind; where the disk fails, the next save tries again."""
        try:
            kind = [one for one in readable(folder, trainer_id) if one.is_automatic is is_automatic]
            for checkpoint in kind[: -self._keep[is_automatic]]:
                remove_checkpoint(folder, checkpoint.number)
        except OSError as error:
            _log.warning("old checkpoints stay", trainer_id=trainer_id, problem=error.strerror)


def _unknown(number: int, numbers: list[int]) -> ServiceError:
    there = f"there is {', '.join(map(str, numbers))}" if numbers else "it has none yet; save one first"
    which = f" {number}" if number else ""
    return ServiceError(ErrorReason.UNKNOWN_CHECKPOINT, f"the trainer has no checkpoint{which}; {there}")


def _corrupt(number: int, numbers: list[int], problem: str) -> ServiceError:
    before = max((other for other in numbers if other < number), default=None)
    advice = f"restore checkpoint {before} instead" if before else "there is none before it"
    return ServiceError(
        ErrorReason.CHECKPOINT_CORRUPT,
        f"checkpoint {number} is damaged: {problem}; {advice}",
        number=str(number),
        previous=str(before or ""),
    )
