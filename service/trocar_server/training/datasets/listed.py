"""Folders of images, sound or texts (one folder per class) that the operator listed in the configuration."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from trocar_api.reasons import ErrorReason
from trocar_api.stored_names import is_stored_name
from trocar_server.errors import ServiceError
from trocar_server.training.datasets.dataset_schema import DatasetInfo
from trocar_server.training.datasets.sample_sources import FolderKind, FolderSource

SUFFIXES: dict[FolderKind, tuple[str, ...]] = {
    "image": (".jpg", ".jpeg", ".png", ".webp"),
    "sound": (".wav", ".flac"),
    "text": (".txt",),
}
"""The first kind with a file counts: notes beside pictures and transcripts beside sound are left out."""
_ALL = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)

_ID = re.compile(r"[0-9a-f]{32}")


class ListedFolder:
    """One folder: its subfolders are the classes by name, their files the samples by relative path.

    Scanned once, when created. Hidden files and folders are left out; links are the operator's business.

    Attributes:
        info: Its metadata.
        source: Its samples.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the name is invalid or there is no sample.
    """

    def __init__(self, name: str, root: Path) -> None:
        if not is_stored_name(name) or _ID.fullmatch(name):
            raise _wrong(name, "the name is 1 to 63 of a-z, 0-9, '.', '_' and '-', and not an id")
        kind, categories, files, labels = _listed(name, root)
        self.source = FolderSource(root, files, np.array(labels, np.int64), kind)
        self.info = DatasetInfo(
            dataset_id=name,
            name=name,
            sample_count=len(files),
            byte_count=0,
            categories=categories,
            signature=self.source.signature,
            stored_at_s=0.0,
            is_listed=True,
        )


def listed_folders(paths: Mapping[str, Path]) -> dict[str, ListedFolder]:
    """Return the folders of the configuration by name.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, one of them is not a valid folder.
    """
    return {name: ListedFolder(name, path.expanduser()) for name, path in sorted(paths.items())}


def _listed(name: str, root: Path) -> tuple[FolderKind, tuple[str, ...], list[str], list[int]]:
    try:
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and _is_shown(entry.name))
        listed = [_files(root, category) for category in classes]
    except OSError as error:
        raise _wrong(name, f"its folder '{root.name}' cannot be listed: {error.strerror}") from None
    kind = _kind(file for files in listed for file in files)
    result = [[file for file in files if file.lower().endswith(SUFFIXES[kind])] for files in listed]
    empty = [category for category, files in zip(classes, result, strict=True) if not files]
    if empty or not classes:
        what = f"class folder '{empty[0]}' has no {kind}" if empty else "it has no class folders"
        raise _wrong(name, f"{what}; it needs one folder of {', '.join(SUFFIXES[kind])} files for each class")
    labels = [label for label, files in enumerate(result) for _ in files]
    return kind, tuple(classes), [file for files in result for file in files], labels


def _kind(files: Iterable[str]) -> FolderKind:
    """Return the kind of the samples; images if it is empty."""
    suffixes = {Path(file).suffix.lower() for file in files}
    for kind, own in SUFFIXES.items():
        if suffixes & set(own):
            return kind
    return "image"


def _files(root: Path, category: str) -> list[str]:
    result = []
    for folder, folders, names in os.walk(root / category):
        folders[:] = filter(_is_shown, folders)
        place = Path(folder).relative_to(root)
        result += [
            (place / name).as_posix() for name in names if _is_shown(name) and name.lower().endswith(_ALL)
        ]
    return sorted(result)


def _is_shown(name: str) -> bool:
    return not name.startswith(".")


def _wrong(name: str, problem: str) -> ServiceError:
    return ServiceError(ErrorReason.INVALID_ARGUMENT, f"datasets.{name[:80]}: {problem}")
