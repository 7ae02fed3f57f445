"""The two files of a checkpoint: `checkpoint-<number>.safetensors`, and `.json` with its manifest."""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from trocar_server.durable import DamagedError, remove_quietly, sync_folder
from trocar_server.training.janitor import CHECKPOINT_MANIFEST
from trocar_server.training.records import Record, read_record
from trocar_server.training.state import TrainerState
from trocar_server.training.tensor_file import read_tensor_file

KIND = "checkpoint"
"""Of its record."""
SAME = "trocar.same"
"""In the header: JSON with the names of tied tensors and the one that is there for each."""

_log = structlog.get_logger("trocar")


class Checkpoint(Record):
    """One checkpoint."""

    trainer_id: str
    """Whose."""
    number: int
    """From 1, in the order of saving; never used twice."""
    created_at_s: float
    """Seconds since 1970."""
    byte_count: int
    """Of the file with the tensors."""
    sha256: str
    """Of that file, in hex."""
    update_count: int
    """Updates of the weights until then."""
    note: str
    """What whoever saved it says about it."""
    is_automatic: bool
    """Whether a fit saved it, and nobody asked for it."""


class Manifest(Record):
    """All that is known of a checkpoint beside its tensors."""

    checkpoint: Checkpoint
    facts: dict[str, Any]
    attached: dict[str, Any]


@dataclass(frozen=True)
class SavedTrainer:
    """What a checkpoint holds."""

    checkpoint: Checkpoint
    """Which."""
    state: TrainerState
    """As it was saved, bit by bit, on the CPU. Tied tensors are one object again."""
    attached: dict[str, Any]
    """What was saved with it."""
    skipped: tuple[int, ...] = ()
    """Numbers of later checkpoints, which are damaged."""


def read_checkpoint(folder: Path, trainer_id: str, number: int) -> SavedTrainer:
    """Read a checkpoint and compare its hashes.

    Raises:
        DamagedError: It is not as it was written.
        OSError: It cannot be read.
    """
    manifest = read_manifest(folder, trainer_id, number)
    checkpoint = manifest.checkpoint
    content = read_tensor_file(data_path(folder, number), checkpoint.byte_count)
    if content.sha256 != checkpoint.sha256:
        raise DamagedError("the sha256 of its tensors is another")
    try:
        same = json.loads(content.metadata[SAME])
        tied = {name: content.tensors[original] for name, original in same.items()}
    except (KeyError, ValueError, AttributeError, TypeError, RecursionError):
        raise DamagedError("it does not say which tensors are tied") from None
    state = TrainerState({**content.tensors, **tied}, manifest.facts)
    return SavedTrainer(checkpoint, state, manifest.attached)


def read_manifest(folder: Path, trainer_id: str, number: int) -> Manifest:
    """Read a manifest alone.

    Raises:
        DamagedError: It is not as it was written.
        OSError: It cannot be read.
    """
    manifest = read_record(manifest_path(folder, number), KIND, Manifest)
    if (manifest.checkpoint.trainer_id, manifest.checkpoint.number) != (trainer_id, number):
        raise DamagedError("it is another checkpoint's")
    return manifest


def readable(folder: Path, trainer_id: str) -> Iterator[Checkpoint]:
    """Yield the checkpoints of a trainer, the oldest first; damaged manifests are logged and left out."""
    for number in numbers_of(folder, CHECKPOINT_MANIFEST):
        try:
            yield read_manifest(folder, trainer_id, number).checkpoint
        except FileNotFoundError:  # dropped meanwhile
            continue
        except DamagedError as error:
            _log.warning("a checkpoint is damaged", trainer_id=trainer_id, number=number, problem=str(error))


def remove_checkpoint(folder: Path, number: int) -> None:
    """Remove a checkpoint such that its manifest is never there without its tensors."""
    os.unlink(manifest_path(folder, number))  # noqa: PTH108 - as in `durable`
    sync_folder(folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(data_path(folder, number))  # noqa: PTH108 - as in `durable`


@contextlib.contextmanager
def undone(folder: Path, number: int) -> Iterator[None]:
    """Leave nothing of a checkpoint where writing it fails."""
    try:
        yield
    except BaseException:
        remove_quietly(manifest_path(folder, number))
        with contextlib.suppress(OSError):
            sync_folder(folder)
        remove_quietly(data_path(folder, number))
        raise


def hashed(pieces: Iterable[bytes | memoryview], digest: Any) -> Iterator[bytes | memoryview]:
    """Hash pieces on their way."""
    for piece in pieces:
        digest.update(piece)
        yield piece


def numbers_of(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    """Return the numbers in the names of files, ascending."""
    matches = (pattern.fullmatch(entry.name) for entry in os.scandir(folder))
    return sorted(int(match[1]) for match in matches if match)


def data_path(folder: Path, number: int) -> Path:
    """Where the tensors are."""
    return folder / f"checkpoint-{number:08}.safetensors"


def manifest_path(folder: Path, number: int) -> Path:
    """Where the manifest is."""
    return folder / f"checkpoint-{number:08}.json"
