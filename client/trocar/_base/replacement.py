"""Replacement of a file: its name leads to the old content or to the complete new one.

The only writer of complete files, and of folders of them, of this package.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

PART = ".part"
"""How the name of something unfinished ends."""
_MOST_CHARACTERS = 40
"""Of a target's name in that of its partial file, so that a long name stays within a file system's limit."""

SAFETENSORS = ".safetensors"
"""How the name of a file of arrays ends."""
_OTHER_FORMATS = {
    ".npz": "numpy.savez(path, **arrays)",
    ".npy": "numpy.save(path, array)",
    ".pt": "torch.save(..., path)",
    ".pth": "torch.save(..., path)",
    ".csv": "numpy.savetxt(path, array)",
}
"""What writes other formats, by suffix."""


FILE_SUFFIXES = (".pt", ".pth", ".npz", ".npy", ".h5", ".hdf5", ".parquet", ".zarr", ".pkl", ".csv", ".json")
"""How no folder of features is called: who writes it wants one file of that format."""


def safetensors_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a safetensors file to write.

    Raises:
        ValueError: Its name says another format: readers would take the file for that.
    """
    chosen = Path(path)
    if chosen.suffix != SAFETENSORS and not chosen.is_dir():  # a folder is refused by its own error
        other = _OTHER_FORMATS.get(chosen.suffix.lower(), "")
        hint = f"; {chosen.suffix} is written by {other}" if other else ""
        raise ValueError(f"{chosen.name!r} must end in {SAFETENSORS}, the format that is written{hint}")
    return chosen


@contextmanager
def replacement(target: Path, *, is_durable: bool = False, mode: int | None = None) -> Iterator[Path]:
    """Give a file its name, and the mode of the one that it replaces, when the context has written it.

        with replacement(Path("features.safetensors")) as partial:
            save_file(arrays, partial)

    A context that fails leaves the old file. A new file has the mode that the umask gives it; until it has
    its name, only its owner can read it.

    Args:
        target: The file.
        is_durable: Whether it is on the disk at the end, also after a power cut.
        mode: The mode of the file, whichever it had before.

    Raises:
        OSError: The file cannot be made, which the error tells by its own name, or not be replaced.
    """
    target = target.resolve() if target.is_symlink() else target  # a link stays one
    partial = _partial(target)
    try:
        partial.touch()
    except OSError as error:  # which names the file that nobody asked for
        raise type(error)(error.errno, error.strerror, str(target)) from None
    try:
        if mode is None:
            mode = (target if target.exists() else partial).stat().st_mode
        partial.chmod(0o600)
        yield partial
        partial.chmod(mode)  # safetensors makes a file for its owner only
        if is_durable:
            _sync(partial)
            _put(partial, target)
        else:
            partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def open_replacement(
    target: Path, *, is_durable: bool = False, mode: int | None = None
) -> Iterator[BinaryIO]:
    """Open a file for writing; see `replacement`.

    Raises:
        OSError: As there.
    """
    with replacement(target, is_durable=is_durable, mode=mode) as partial, partial.open("wb") as file:
        yield file


def write_file(
    target: Path,
    content: bytes | str | Iterable[bytes | memoryview],
    *,
    is_durable: bool = False,
    mode: int | None = None,
) -> None:
    """Write a file in one step; see `replacement`. A pipe or a device just gets the bytes.

    Args:
        target: The file.
        content: All of it, one piece after another, or a text, which becomes UTF-8.
        is_durable: As there.
        mode: As there.

    Raises:
        OSError: As there.
    """
    if isinstance(content, str | bytes):
        content = (content.encode() if isinstance(content, str) else content,)
    is_pipe = target.exists() and not (target.is_file() or target.is_dir())
    with target.open("wb") if is_pipe else open_replacement(target, is_durable=is_durable, mode=mode) as file:
        for piece in content:
            file.write(piece)


@contextmanager
def folder_replacement(target: Path) -> Iterator[Path]:
    """Give a folder its name, durably, when the context has filled it; an older one is deleted first.

        with folder_replacement(Path("features-00000")) as partial:
            write_file(partial / "keys.json", "[]")

    A context that fails leaves the older folder.

    Raises:
        OSError: The folder cannot be made or not be replaced.
    """
    partial = _partial(target)
    partial.mkdir()
    try:
        yield partial
        for folder, _, names in os.walk(partial):
            for name in names:
                _sync(Path(folder, name))
            _sync(Path(folder))
        if target.is_dir():
            shutil.rmtree(target)
        _put(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _partial(target: Path) -> Path:
    """Return a name of its own, for each thread and process that writes to the same target."""
    return target.with_name(f".{target.name[:_MOST_CHARACTERS]}.{uuid4().hex}{PART}")


def _put(partial: Path, target: Path) -> None:
    """Give a finished file or folder, whose bytes are on the disk, its name, durably."""
    partial.replace(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    if path.is_dir() and sys.platform == "win32":
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
