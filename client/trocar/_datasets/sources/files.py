"""Image files: listed one by one, or all of a folder."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trocar._datasets.sample import MAX_SAMPLE_BYTES, Sample, Source
from trocar.errors import SourceError

SERVER_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})
"""What the server decodes."""
CLIENT_SUFFIXES = SERVER_SUFFIXES | {".bmp", ".gif", ".tif", ".tiff", ".ppm"}
"""What is taken from a folder when the client decodes."""


def file_source(paths: Sequence[Path], name: str = "") -> Source:
    """Return the source of these files; a key is the path as it was given.

    Raises:
        SourceError: A file is not there.
    """
    entries = [(printable(str(path)), path) for path in paths]
    return _source("files", name, entries)


def folder_source(root: Path, suffixes: frozenset[str], *, prefix: str = "") -> Source:
    """Return the source of all images below a folder, sorted by relative path.

    Hidden files and folders are left out. Links to folders are not followed, and links to files only
    where they stay inside.

    Args:
        root: The folder.
        suffixes: Which files are images, in lower case.
        prefix: Put before every key, a relative path.

    Raises:
        SourceError: There is no image.
    """
    found, notes = list_images(root, suffixes)
    entries = [(printable(prefix + path.relative_to(root).as_posix()), path) for path in found]
    return _source("folder", printable(str(root.resolve())), entries, notes)


def list_images(root: Path, suffixes: frozenset[str]) -> tuple[list[Path], tuple[str, ...]]:
    """List the images below a folder, sorted by relative path, and say what was left out.

    Raises:
        SourceError: There is no image, or a folder cannot be listed.
    """
    images, others, outside = [], 0, 0
    inside = root.resolve()
    for folder, folders, names in os.walk(root, onerror=_fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if name.startswith("."):
                continue
            if path.suffix.lower() not in suffixes:
                others += 1
            elif path.is_symlink() and not path.resolve().is_relative_to(inside):
                outside += 1
            else:
                images.append(path)
    if not images:
        raise SourceError(f"no image below {root}: {_advice(others, outside, suffixes)}")
    left_out = [f"{others} of other kinds"] * bool(others)
    left_out += [f"{outside} links that lead out of it"] * bool(outside)
    notes = (f"files left out below {root}: {', '.join(left_out)}",) if left_out else ()
    return sorted(images, key=lambda path: path.relative_to(root).as_posix()), notes


def printable(name: str) -> str:
    """Return a name that any JSON can hold: bytes of a path that are no UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def read_file(path: Path) -> bytes:
    """Read a file that is not unreasonably large.

    Raises:
        SourceError: It is.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(MAX_SAMPLE_BYTES + 1)
    if len(data) > MAX_SAMPLE_BYTES:
        raise SourceError(f"{path} has more than {MAX_SAMPLE_BYTES >> 20} MiB; it is taken for no sample")
    return data


def stat_fingerprint(entries: Iterable[tuple[str, Path]]) -> str:
    """Hash names, sizes and modification times; nothing is read.

    Raises:
        SourceError: A file is not there.
    """
    digest = hashlib.sha256()
    for key, path in entries:
        try:
            status = path.stat()
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from error
        digest.update(f"{key}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _source(kind: str, name: str, entries: Sequence[tuple[str, Path]], notes: tuple[str, ...] = ()) -> Source:
    description: dict[str, Any] = {"kind": kind, "name": name, "count": len(entries)}
    description["fingerprint"] = stat_fingerprint(entries)
    return Source(description, _reader(entries), len(entries), notes)


def _reader(entries: Sequence[tuple[str, Path]]) -> Callable[[int], Iterator[Sample]]:
    def samples(start: int) -> Iterator[Sample]:
        for index in range(start, len(entries)):
            key, path = entries[index]
            yield Sample(key, partial(read_file, path), (index + 1) / len(entries))

    return samples


def _advice(others: int, outside: int, suffixes: frozenset[str]) -> str:
    kinds = ", ".join(sorted(suffixes))
    if outside:
        return f"{outside} links lead out of it and are not followed; name their target instead"
    if others:
        return (
            f"none of its {others} files ends in {kinds}; --decode client takes more formats; .npy and .tar "
            "files are named themselves"
        )
    return f"it is empty; images end in {kinds}"


def _fail(error: OSError) -> None:
    raise SourceError(f"{error.filename}: {error.strerror}") from error
