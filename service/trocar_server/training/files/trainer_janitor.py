"""Trainer janitor: removes partial files and folders that a killed server left among trainers and models.

By our own names only, and only in the process that holds the data lock: then there is no other writer.

# Note: [Leftovers of trainers]
A file that was being written has the suffix `PARTIAL`. Tensors are written before the file that names them: a
checkpoint's before its manifest, a published model's before its record. Tensors that no file names are
leftovers. A folder without a record and without checkpoints was never acknowledged, one that begins with `~`
is being deleted. Damaged files are no leftovers: they stay, for their owner to see.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog

from trocar_api.stored_names import is_stored_name

TRAINER_ID = re.compile(r"[0-9a-f]{32}")
"""Of a trainer and its folder, such as `uuid.uuid4().hex`. No published model has such an id."""
RECORD_NAME = "trainer.json"
"""Of a trainer."""
MODEL_NAME = "model.json"
"""Of a published model."""
CHECKPOINT_DATA = re.compile(r"checkpoint-(\d{8,16})\.safetensors")
CHECKPOINT_MANIFEST = re.compile(r"checkpoint-(\d{8,16})\.json")
WEIGHTS = re.compile(r"weights-[0-9a-f]{32}\.safetensors")
JOURNAL_ENTRY = re.compile(r"step-(\d{8,16})-(\d{8,16})\.(?:safetensors|attempts)")
EVENTS_NAME = "events.jsonl"
"""Events of a trainer's fits, where trainers can be taken over by other servers."""

_PARTIAL = re.compile(
    r"(?:trainer|model|events|checkpoint-\d{8,16}|step-\d{8,16}-\d{8,16}|weights-[0-9a-f]{32})"
    r"-[0-9a-f]{32}\.partial"
)
_DELETED_FOLDER = re.compile(r"~[0-9a-f]{32}")
_log = structlog.get_logger("trocar")


def clean_trainers(folder: Path) -> int:
    """Remove leftovers, see Note: [Leftovers of trainers]; return the number of files and folders."""
    count = 0
    for path in _folders(folder):
        with _told(path):
            if _DELETED_FOLDER.fullmatch(path.name):
                count += remove_tree(path)
            elif TRAINER_ID.fullmatch(path.name):
                count += clean_trainer(path)
    return count


def unfinished_checkpoints(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return numbers of checkpoints without a manifest by trainer, those newer than all that have one.

    Their save was cut off, or the manifest was lost since: the two look the same.
    """
    result = {}
    for path in _folders(folder):
        with _told(path):
            names = _names(path)
            newest = max(
                (int(match[1]) for match in map(CHECKPOINT_MANIFEST.fullmatch, names) if match), default=0
            )
            numbers = sorted(int(match[1]) for match in map(CHECKPOINT_DATA.fullmatch, names) if match)
            if newer := tuple(number for number in numbers if number > newest):
                result[path.name] = newer
    return result


def clean_published(folder: Path, used: Iterable[tuple[str, str]]) -> int:
    """Remove leftovers of published models; return the number of files and folders.

    Args:
        folder: That of all models.
        used: Model ids, and the names of the files with their weights. Of a model that is damaged, and so
            not here, everything stays.
    """
    files = dict(used)
    count = 0
    for path in _folders(folder):
        if not is_stored_name(path.name):
            continue
        with _told(path):
            names = _names(path)
            has_record = MODEL_NAME in names
            for name in names:
                is_unused = path.name in files and name != files[path.name]
                is_dead = WEIGHTS.fullmatch(name) and (not has_record or is_unused)
                if is_dead or _PARTIAL.fullmatch(name):
                    _unlink(path / name)
                    count += 1
            if not has_record:
                count += _remove_if_empty(path)
    return count


def remove_tree(folder: Path) -> int:
    """Remove a folder with the files of ours in it; returns how many. A folder with others in it stays.

    Raises:
        OSError: Not all of it could be removed.
    """
    count = 0
    for name in _names(folder):
        if name in (RECORD_NAME, MODEL_NAME, EVENTS_NAME) or _is_file_of_ours(name):
            _unlink(folder / name)
            count += 1
    return count + _remove_if_empty(folder)


def clean_trainer(path: Path) -> int:
    """Remove the leftovers of one trainer; return the number of files and folders."""
    names = _names(path)
    has_record = RECORD_NAME in names
    manifests = {match[1] for match in map(CHECKPOINT_MANIFEST.fullmatch, names) if match}
    count = 0
    for name in names:
        data = CHECKPOINT_DATA.fullmatch(name)
        if _PARTIAL.fullmatch(name) or (data and data[1] not in manifests):
            _unlink(path / name)
            count += 1
    return count if has_record or manifests else count + _remove_if_empty(path)


def _is_file_of_ours(name: str) -> bool:
    patterns = (CHECKPOINT_DATA, CHECKPOINT_MANIFEST, JOURNAL_ENTRY, WEIGHTS, _PARTIAL)
    return any(pattern.fullmatch(name) for pattern in patterns)


def _remove_if_empty(folder: Path) -> int:
    if _names(folder):
        return 0
    os.rmdir(folder)  # noqa: PTH106 - as in `durable`
    return 1


def _unlink(path: Path) -> None:
    os.unlink(path)  # noqa: PTH108 - as in `durable`


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder))


def _folders(folder: Path) -> list[Path]:
    """Return the folders in one; symbolic links do not count."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return []
    return sorted(folder / entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Log a disk failure and continue with the next folder."""
    try:
        yield
    except OSError as error:
        _log.warning("leftovers cannot be removed", folder=path.name, problem=error.strerror)
