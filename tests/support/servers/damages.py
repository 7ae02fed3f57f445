"""Ways in which a file on a server's disk can go wrong."""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flip": _flip,
    "cut": _cut,
    "zero": _zero,
    "delete": Path.unlink,
}
"""What happens to a file's content, by name."""


def deny(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Let the disk refuse to open a file, or anything below a folder: rights do not stop a superuser's
    tests."""
    real_open, real_scandir, real_file = os.open, os.scandir, io.open

    def is_denied(given: object) -> bool:
        return isinstance(given, str | os.PathLike) and Path(given).is_relative_to(path)

    def refuse() -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def opened(given: Any, *arguments: Any, **named: Any) -> Any:
        if is_denied(given):
            refuse()
        return real_open(given, *arguments, **named)

    def scanned(given: Any = ".") -> Any:
        if is_denied(given):
            refuse()
        return real_scandir(given)

    def opened_file(given: Any, *arguments: Any, **named: Any) -> Any:
        if is_denied(given):
            refuse()
        return real_file(given, *arguments, **named)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "scandir", scanned)
    monkeypatch.setattr(io, "open", opened_file)  # of `pathlib`


def deny_writing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let a folder be on a disk that is read-only."""
    real = os.open

    def opened(given: Any, flags: int, *arguments: Any, **named: Any) -> Any:
        is_there = isinstance(given, str | os.PathLike) and Path(given).is_relative_to(folder)
        if is_there and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(given, flags, *arguments, **named)

    monkeypatch.setattr(os, "open", opened)
