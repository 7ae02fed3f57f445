"""Folder shards: a folder per class, files as they are, undecoded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from trocar._sources.files import SERVER_SUFFIXES, list_images, printable, read_file
from trocar._uploads.shards import MAX_SHARD_SAMPLES, Parts, Shard, Tensor, image_parts, make_shard
from trocar._uploads.upload_plan import UploadPlan
from trocar.errors import SourceError


@dataclass(frozen=True)
class _File:
    path: Path
    label: int


def folder_plan(root: Path, name: str, shard_bytes: int) -> UploadPlan:
    """Return the plan of a folder: its classes are its folders by name, its samples their images by path.

    Hidden files and folders are left out, and links that lead out of the folder.

    Args:
        root: The folder.
        name: Name of the data set; the folder's own name when empty.
        shard_bytes: Of one shard.

    Raises:
        SourceError: It has no class folders, or one of them no image.
    """
    try:
        folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise SourceError(f"{root}: {error.strerror}") from error
    if not folders:
        raise SourceError(
            f"{root} has no class folders; it needs one folder of images per class, as root/daisy/1.jpg"
        )
    files = [
        _File(path, label)
        for label, folder in enumerate(folders)
        for path in list_images(folder, SERVER_SUFFIXES)[0]
    ]
    categories = tuple(printable(folder.name) for folder in folders)
    chosen = name or printable(root.resolve().name) or "folder"
    return UploadPlan(chosen, categories, len(files), partial(_shards, files, shard_bytes))


def _shards(files: Sequence[_File], shard_bytes: int) -> Iterator[Shard]:
    group: list[_File] = []
    size = 0
    for file in files:
        file_bytes = file.path.stat().st_size
        if group and (size + file_bytes > shard_bytes or len(group) == MAX_SHARD_SAMPLES):
            yield make_shard(partial(_build, group), len(group))
            group, size = [], 0
        group.append(file)
        size += file_bytes
    yield make_shard(partial(_build, group), len(group))


def _build(files: Sequence[_File]) -> Parts:
    images = [read_file(file.path) for file in files]
    for file, image in zip(files, images, strict=True):
        if not image:
            raise SourceError(f"{file.path} is empty, not an image")
    labels = Tensor("int64", np.array([file.label for file in files], np.int64))
    return image_parts(images, {"targets": labels})
