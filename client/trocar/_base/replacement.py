"""Replacement of a file: its name leads to the old content or to the complete new one.

The only writer of complete files of this package; what is first written elsewhere gets its name by `put`.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

PART = ".part"
"""How the name of something unfinished ends."""


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
    # Of its own, for each thread and process that writes to the same name.
    partial = target.with_name(f".{target.name}.{uuid4().hex}{PART}")
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
            sync(partial)
            put(partial, target)
        else:
            partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def write_file(
    target: Path, content: bytes | str, *, is_durable: bool = False, mode: int | None = None
) -> None:
    """Write a file in one step; see `replacement`. A pipe or a device just gets the bytes.

    A text becomes UTF-8.

    Raises:
        OSError: As there.
    """
    data = content.encode() if isinstance(content, str) else content
    if target.exists() and not (target.is_file() or target.is_dir()):
        with target.open("wb") as file:
            file.write(data)
        return
    with replacement(target, is_durable=is_durable, mode=mode) as partial, partial.open("wb") as file:
        file.write(data)


def put(part: Path, target: Path) -> None:
    """Give a finished file or folder, whose bytes are on the disk, its name, durably."""
    part.replace(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    if path.is_dir() and sys.platform == "win32":
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
