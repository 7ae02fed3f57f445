"""Checkpoint files: `checkpoint-<number>.safetensors`, and `.json` with its manifest."""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from trocar_server.storage.durable import DamagedError, remove_quietly, sync_folder
from trocar_server.storage.sealed_record import Record, read_record
from trocar_server.storage.tensor_file import read_tensor_file
from trocar_server.training.files.trainer_janitor import CHECKPOINT_MANIFEST
from trocar_server.training.step.trainer_state import TrainerState

KIND = "checkpoint"
"""Kind of the manifest's record."""
SAME = "trocar.same"
"""Key in the header: JSON with the names of tied tensors and the stored one for each."""

PRINCIPAL = "principal"
"""Key in a checkpoint's attached data: the trainer's owner, in case its record is lost."""

_log = structlog.get_logger("trocar")


class Checkpoint(Record):
    """One checkpoint."""

    trainer_id: str
    """Id of its trainer."""
    number: int
    """Counted from 1, in the order of saving; never reused."""
    created_at_s: float
    """Seconds since 1970."""
    byte_count: int
    """Of the file with the tensors."""
    sha256: str
    """Of that file, in hex."""
    update_count: int
    """Weight updates so far."""
    note: str
    """Note given when it was saved."""
    is_automatic: bool
    """Whether a fit saved it, without a request."""
    next_number: int = 0
    """Number of the trainer's next call."""
    request_id: str = ""
    """Id of the request that it was saved for; a repeated one gets this checkpoint again."""


class CheckpointManifest(Record):
    """Metadata of a checkpoint: everything beside its tensors."""

    checkpoint: Checkpoint
    facts: dict[str, Any]
    attached: dict[str, Any]


@dataclass(frozen=True)
class SavedTrainer:
    """Contents of a checkpoint."""

    checkpoint: Checkpoint
    """Its metadata."""
    state: TrainerState
    """The saved state, bit by bit, on the CPU. Tied tensors are one object again."""
    attached: dict[str, Any]
    """Data saved with it."""
    skipped: tuple[int, ...] = ()
    """Numbers of later, damaged checkpoints that were skipped."""
    problems: tuple[str, ...] = ()
    """The problem of each skipped checkpoint."""


def read_checkpoint(folder: Path, trainer_id: str, number: int) -> SavedTrainer:
    """Read a checkpoint and verify its hashes.

    Raises:
        DamagedError: It differs from what was written.
        OSError: It cannot be read.
    """
    manifest = read_manifest(folder, trainer_id, number)
    checkpoint = manifest.checkpoint
    content = read_tensor_file(data_path(folder, number), checkpoint.byte_count)
    if content.sha256 != checkpoint.sha256:
        raise DamagedError("the sha256 of its tensors does not match")
    try:
        same = json.loads(content.metadata[SAME])
        tied = {name: content.tensors[original] for name, original in same.items()}
    except (KeyError, ValueError, AttributeError, TypeError, RecursionError):
        raise DamagedError("it does not say which tensors are tied") from None
    state = TrainerState({**content.tensors, **tied}, manifest.facts)
    return SavedTrainer(checkpoint, state, manifest.attached)


def read_manifest(folder: Path, trainer_id: str, number: int) -> CheckpointManifest:
    """Read a manifest alone.

    Raises:
        DamagedError: It differs from what was written.
        OSError: It cannot be read.
    """
    manifest = read_record(manifest_path(folder, number), KIND, CheckpointManifest)
    if (manifest.checkpoint.trainer_id, manifest.checkpoint.number) != (trainer_id, number):
        raise DamagedError("it belongs to another checkpoint")
    return manifest


def damaged_checkpoints(folder: Path, trainer_id: str) -> Iterator[tuple[int, str]]:
    """Yield checkpoints that cannot be restored, and why, judged by size and manifest."""
    for number in numbers_of(folder, CHECKPOINT_MANIFEST):
        try:
            expected = read_manifest(folder, trainer_id, number).checkpoint.byte_count
            result = os.stat(data_path(folder, number)).st_size  # noqa: PTH116 - as in `durable`
            if result != expected:
                yield number, f"its tensors have {result:,} bytes, expected {expected:,}"
        except FileNotFoundError:
            if manifest_path(folder, number).exists():
                yield number, "its tensor file is missing"
        except DamagedError as error:
            yield number, f"its manifest is damaged: {error}"
        except OSError as error:
            yield number, f"it cannot be read: {error.strerror}"


def readable(folder: Path, trainer_id: str) -> Iterator[Checkpoint]:
    """Yield a trainer's checkpoints, oldest first; damaged manifests are logged and left out."""
    for number in numbers_of(folder, CHECKPOINT_MANIFEST):
        try:
            yield read_manifest(folder, trainer_id, number).checkpoint
        except FileNotFoundError:  # dropped meanwhile
            continue
        except DamagedError as error:
            _log.warning("a checkpoint is damaged", trainer_id=trainer_id, number=number, problem=str(error))


def remove_checkpoint(folder: Path, number: int) -> None:
    """Remove a checkpoint, its manifest first: there is never a manifest without tensors."""
    os.unlink(manifest_path(folder, number))  # noqa: PTH108 - as in `durable`
    sync_folder(folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(data_path(folder, number))  # noqa: PTH108 - as in `durable`


@contextlib.contextmanager
def undone(folder: Path, number: int) -> Iterator[None]:
    """Remove all files of a checkpoint if writing it fails."""
    try:
        yield
    except BaseException:
        remove_quietly(manifest_path(folder, number))
        with contextlib.suppress(OSError):
            sync_folder(folder)
        remove_quietly(data_path(folder, number))
        raise


def hashed(pieces: Iterable[bytes | memoryview], digest: Any) -> Iterator[bytes | memoryview]:
    """Pass pieces through, updating a hash."""
    for piece in pieces:
        digest.update(piece)
        yield piece


def numbers_of(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    """Return the numbers in the names of files, ascending."""
    matches = (pattern.fullmatch(entry.name) for entry in os.scandir(folder))
    return sorted(int(match[1]) for match in matches if match)


def data_path(folder: Path, number: int) -> Path:
    """Path of the tensors."""
    return folder / f"checkpoint-{number:08}.safetensors"


def manifest_path(folder: Path, number: int) -> Path:
    """Path of the manifest."""
    return folder / f"checkpoint-{number:08}.json"
