"""Files of images, sound or texts: a list, or all of a folder."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trocar._base.input_kinds import IMAGE_SUFFIXES
from trocar._sources.sample import MAX_SAMPLE_BYTES, Sample, SoundSample, Source, TextSample
from trocar.errors import SourceError

SERVER_SUFFIXES = frozenset(IMAGE_SUFFIXES)
"""What the server decodes."""
CLIENT_SUFFIXES = SERVER_SUFFIXES | {".bmp", ".gif", ".tif", ".tiff", ".ppm"}
"""What is taken from a folder when the client decodes."""
SOUND_SUFFIXES = frozenset({".wav", ".flac"})
"""Sound that the server reads."""
TEXT_SUFFIXES = frozenset({".txt"})
"""Texts, one a file."""


def file_source(paths: Sequence[Path], name: str = "") -> Source:
    """Return the source of these files; a key is the path as it was given.

    Raises:
        SourceError: A file does not exist.
    """
    entries = [(printable(str(path)), path) for path in paths]
    return _source("files", name, entries)


def folder_source(root: Path, suffixes: frozenset[str], *, prefix: str = "") -> Source:
    """Return the source of all images below a folder, sorted by relative path.

    Of a folder without an image the .wav and .flac files, and without these the .txt files. Hidden files and
    folders are left out. Links to folders are not followed, and links to files only if they stay inside.

    Args:
        root: The folder.
        suffixes: Which files are images, in lower case.
        prefix: Put before every key, a relative path.

    Raises:
        SourceError: There is no such file.
    """
    result, notes = list_samples(root, suffixes)
    entries = [(printable(prefix + path.relative_to(root).as_posix()), path) for path in result]
    return _source("folder", printable(str(root.resolve())), entries, notes)


def list_samples(root: Path, suffixes: frozenset[str]) -> tuple[list[Path], tuple[str, ...]]:
    """List the images below a folder, or its sound, or its texts, and what was left out.

    Raises:
        SourceError: There is none, or a folder cannot be listed.
    """
    others = outside = 0
    for kind in (suffixes, SOUND_SUFFIXES, TEXT_SUFFIXES):
        result, others, outside = list_files(root, kind)
        if result:
            return result, _left_out(root, others, outside)
    kinds = suffixes | SOUND_SUFFIXES | TEXT_SUFFIXES
    raise SourceError(f"no image below {root}: {_advice(others, outside, kinds)}")


def list_images(root: Path, suffixes: frozenset[str]) -> tuple[list[Path], tuple[str, ...]]:
    """List the images below a folder, sorted by relative path, and what was left out.

    Raises:
        SourceError: There is no image, or a folder cannot be listed.
    """
    result, others, outside = list_files(root, suffixes)
    if not result:
        raise SourceError(f"no image below {root}: {_advice(others, outside, suffixes)}")
    return result, _left_out(root, others, outside)


def _left_out(root: Path, others: int, outside: int) -> tuple[str, ...]:
    left_out = [f"{others} of other types"] * bool(others)
    left_out += [f"{outside} links to outside of it"] * bool(outside)
    return (f"files left out below {root}: {', '.join(left_out)}",) if left_out else ()


def list_files(root: Path, suffixes: frozenset[str]) -> tuple[list[Path], int, int]:
    """List the files of some types below a folder, sorted by relative path.

    Hidden files and folders are left out.

    Returns:
        The files; the number of files of other types; the number of links that lead out of the folder.

    Raises:
        SourceError: A folder cannot be listed.
    """
    result, others, outside = [], 0, 0
    inside = root.resolve()
    for folder, folders, names in os.walk(root, onerror=_fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if name.startswith("."):
                continue
            if path.suffix.lower() not in suffixes:
                others += 1
            elif path.is_symlink() and not _is_inside(path, inside):
                outside += 1
            elif stat.S_ISREG(path.stat().st_mode):
                result.append(path)
            else:  # reading a pipe would block
                others += 1
    return sorted(result, key=lambda path: path.relative_to(root).as_posix()), others, outside


def _is_inside(link: Path, folder: Path) -> bool:
    """Whether a link points into a folder; a broken one does not."""
    try:
        return link.resolve(strict=True).is_relative_to(folder)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        return False


def printable(name: str) -> str:
    """Return a name that is valid in JSON: bytes of a path that are no UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def read_file(path: Path) -> bytes:
    """Read a file, up to a size limit.

    Raises:
        SourceError: It is.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(MAX_SAMPLE_BYTES + 1)
    if len(data) > MAX_SAMPLE_BYTES:
        raise SourceError(f"{path} has more than {MAX_SAMPLE_BYTES >> 20} MiB; it is too large for a sample")
    return data


def read_sample(path: Path) -> bytes | TextSample | SoundSample:
    """Read a file as the sample that its suffix says: sound, a text, or else an encoded image.

    Raises:
        SourceError: It is too large, or a text that is empty or no UTF-8.
        OSError: It cannot be read.
    """
    data = read_file(path)
    suffix = path.suffix.lower()
    if suffix in SOUND_SUFFIXES:
        return SoundSample(data)
    return TextSample(decoded_text(path, data)) if suffix in TEXT_SUFFIXES else data


def decoded_text(path: Path, data: bytes) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        SourceError: It is empty, or no UTF-8.
    """
    if not data:
        raise SourceError(f"{path} is empty, not a text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} is no text in UTF-8 (byte {error.start}); convert it, for example with iconv"
        ) from error


def check_regular(path: Path) -> None:
    """Reject paths that cannot be read twice: a folder, a pipe, a device.

    Raises:
        SourceError: It does not exist, or is no regular file.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links
        raise SourceError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(mode):
        raise SourceError(f"{path} is not a regular file; pipes and folders cannot be read here")


def stat_fingerprint(entries: Iterable[tuple[str, Path]]) -> str:
    """Hash names, sizes and modification times; nothing is read.

    Raises:
        SourceError: A file does not exist.
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
            yield Sample(key, partial(read_sample, path), (index + 1) / len(entries))

    return samples


def _advice(others: int, outside: int, suffixes: frozenset[str]) -> str:
    kinds = ", ".join(sorted(suffixes))
    if outside:
        return f"{outside} links lead outside and are not followed; give their targets instead"
    if others:
        return (
            f"none of its {others} files ends in {kinds}; --decode client takes more formats; give .npy "
            "and .tar "
            "files by path"
        )
    return f"it is empty; samples end in {kinds}"


def _fail(error: OSError) -> None:
    raise SourceError(f"{error.filename}: {error.strerror}") from error
