"""Folder shards: a folder per class, files as they are: pictures or sound, undecoded, or texts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from trocar._sources.files import (
    SERVER_SUFFIXES,
    SOUND_SUFFIXES,
    TEXT_SUFFIXES,
    decoded_text,
    list_files,
    list_images,
    printable,
    read_file,
)
from trocar._uploads.shards import (
    MAX_SHARD_SAMPLES,
    MakeParts,
    Parts,
    Shard,
    Tensor,
    image_parts,
    make_shard,
    sound_parts,
    text_parts,
)
from trocar._uploads.text_shards import encoded_text
from trocar._uploads.upload_plan import UploadPlan
from trocar.errors import SourceError


@dataclass(frozen=True)
class _File:
    path: Path
    label: int


@dataclass(frozen=True)
class _Kind:
    """One kind of sample that a folder may have."""

    noun: str
    suffixes: frozenset[str]
    parts: MakeParts


_IMAGES = _Kind("image", SERVER_SUFFIXES, image_parts)
_KINDS = (
    _IMAGES,
    _Kind("sound", SOUND_SUFFIXES, sound_parts),
    _Kind("text", TEXT_SUFFIXES, text_parts),
)
"""The first with a file counts: notes beside pictures and transcripts beside sound are left out."""
_SUFFIXES = frozenset().union(*(kind.suffixes for kind in _KINDS))


def folder_plan(root: Path, name: str, shard_bytes: int) -> UploadPlan:
    """Return the plan of a folder: its classes are its folders by name, its samples their files by path.

    Samples are pictures; or .wav and .flac files where there is no picture; or .txt files, each a text in
    UTF-8, where there is neither. Hidden files and folders are left out, and links that lead out of the
    folder.

    Args:
        root: The folder.
        name: Name of the data set; the folder's own name when empty.
        shard_bytes: Of one shard.

    Raises:
        SourceError: It has no class folders, or one of them no sample.
    """
    try:
        folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise SourceError(f"{root}: {error.strerror}") from error
    if not folders:
        raise SourceError(
            f"{root} has no class folders; it needs one folder of images, sound or texts per class, as "
            "root/daisy/1.jpg"
        )
    result = {folder: list_files(folder, _SUFFIXES)[0] for folder in folders}
    kind = _kind(result.values())
    files = [
        _File(path, label)
        for label, (folder, paths) in enumerate(result.items())
        for path in _of_kind(kind, folder, paths)
    ]
    categories = tuple(printable(folder.name) for folder in folders)
    chosen = name or printable(root.resolve().name) or "folder"
    return UploadPlan(chosen, categories, len(files), partial(_shards, files, kind, shard_bytes))


def _kind(outcome: Iterable[Sequence[Path]]) -> _Kind:
    """Return the kind of the samples; images if it is empty."""
    suffixes = {path.suffix.lower() for paths in outcome for path in paths}
    return next((kind for kind in _KINDS if kind.suffixes & suffixes), _IMAGES)


def _of_kind(kind: _Kind, folder: Path, paths: Sequence[Path]) -> list[Path]:
    """Return the files of a class that are samples.

    Raises:
        SourceError: There are none.
    """
    samples = [path for path in paths if path.suffix.lower() in kind.suffixes]
    if samples:
        return samples
    if kind is _IMAGES:
        return list_images(folder, kind.suffixes)[0]  # raises, with what is there instead
    suffixes = " or ".join(sorted(kind.suffixes))
    raise SourceError(f"no {kind.noun} below {folder}: other classes have {suffixes} files, it has none")


def _shards(files: Sequence[_File], kind: _Kind, shard_bytes: int) -> Iterator[Shard]:
    group: list[_File] = []
    size = 0
    for file in files:
        file_bytes = file.path.stat().st_size
        if group and (size + file_bytes > shard_bytes or len(group) == MAX_SHARD_SAMPLES):
            yield make_shard(partial(_build, group, kind), len(group))
            group, size = [], 0
        group.append(file)
        size += file_bytes
    yield make_shard(partial(_build, group, kind), len(group))


def _build(files: Sequence[_File], kind: _Kind) -> Parts:
    samples = [_read(file.path, kind) for file in files]
    labels = Tensor("int64", np.array([file.label for file in files], np.int64))
    return kind.parts(samples, {"targets": labels})


def _read(path: Path, kind: _Kind) -> bytes:
    """Read one sample as the server stores it."""
    data = read_file(path)
    if not data:
        raise SourceError(f"{path} is empty, not {'an image' if kind is _IMAGES else f'a {kind.noun}'}")
    return encoded_text(decoded_text(path, data)) if kind.suffixes is TEXT_SUFFIXES else data
