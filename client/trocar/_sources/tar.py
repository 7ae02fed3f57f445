"""Tar archives: members, with limits on everything that a header can request.

The standard library's `tarfile` parses one header of 512 bytes here, and no more: its own walk reads long
names, pax headers and sparse maps of any length, fills the holes of sparse members, and follows chains of
headers by recursion. An archive of 1.5 KB took 584 MiB.
Formats: https://www.gnu.org/software/tar/manual/html_node/Standard.html and POSIX `pax`
"""

import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from trocar.errors import SourceError

BLOCK = tarfile.BLOCKSIZE
MAX_NAME_BYTES = 4 << 10
"""Of a member's name: the longest path that Linux takes."""
MAX_PAX_BYTES = 1 << 20
"""Of one pax header, which may hold extended attributes, too."""

_LONG_NAME, _LONG_LINK = tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_WITHOUT_DATA = (
    *(tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE),
    *(tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE),
)
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE)
_EXTENDED = 482
"""Where an old sparse header says whether a block of its map follows; such a block says it at byte 504."""


@dataclass(frozen=True)
class Member:
    """A regular file in an archive."""

    name: str
    offset: int
    """Where its bytes begin in the archive."""
    size: int
    """How many there are."""
    is_sparse: bool = False
    """Whether they are the pieces of a file with holes, after their map."""


@dataclass
class _Extensions:
    """Fields of extended headers, for the member after them."""

    name: str = ""
    values: Mapping[str, bytes] = field(default_factory=dict)


def members(file: BinaryIO, path: Path) -> Iterator[Member]:
    """Yield the regular files of a plain archive in order; only headers are read.

    Args:
        file: The archive, open for reading; may be moved between two members.
        path: Its name, for messages.

    Raises:
        SourceError: It is not an uncompressed tar archive, or damaged, or a header exceeds a limit.
    """
    end = file.seek(0, 2)
    position, extensions = 0, _Extensions()
    while (header := _header(file, path, position)) is not None:
        kind, start, size = header.type, position + BLOCK, header.size
        if kind in (_LONG_NAME, _LONG_LINK):
            text = _extension(file, path, start, size, MAX_NAME_BYTES, "a name")
            if kind == _LONG_NAME:
                extensions.name = _text(text.partition(b"\0")[0])
        elif kind in _PAX:
            extensions.values = _pax(_extension(file, path, start, size, MAX_PAX_BYTES, "a pax header"))
        elif kind == tarfile.XGLTYPE:  # of all members, so that it names none
            _check_extension(path, start, size, MAX_PAX_BYTES, "a pax header")
        else:
            start += _map_bytes(file, path, start, header)
            member, extensions = _member(path, position, start, header, extensions), _Extensions()
            size = 0 if kind in _WITHOUT_DATA else member.size
            if kind in _FILES:
                yield member
        position = start + _padded(size)
        if position > end:
            raise _damaged(path, end, f"it ends there, and its last member at byte {position}")


def _header(file: BinaryIO, path: Path, position: int) -> tarfile.TarInfo | None:
    """Parse the header at a position; None at the archive's end."""
    block = _read(file, position, BLOCK)
    if position and (not block or (len(block) == BLOCK and not any(block))):
        return None
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        if block and not any(block):
            return None  # an archive of nothing
        if not position:
            raise SourceError(
                f"{path} is not an uncompressed tar archive ({error}); decompress it first, for example "
                "with gunzip"
            ) from error
        raise _damaged(path, position, f"no tar header there ({error}), the rest is lost") from error
    if header.size < 0:
        raise _damaged(path, position, f"a size of {header.size} bytes")
    return header


def _extension(file: BinaryIO, path: Path, position: int, size: int, limit: int, what: str) -> bytes:
    """Read the contents of an extended header."""
    _check_extension(path, position, size, limit, what)
    data = _read(file, position, size)
    if len(data) != size:
        raise _damaged(path, position, f"{what} is cut off, {len(data)} of {size} bytes")
    return data


def _check_extension(path: Path, position: int, size: int, limit: int, what: str) -> None:
    if size > limit:
        raise _damaged(path, position, f"{what} of {size:,} bytes; the limit is {limit:,}")


def _pax(data: bytes) -> dict[str, bytes]:
    """Return the values of a pax header that change a member's position; an invalid record ends it."""
    result: dict[str, bytes] = {}
    start = 0
    while start < len(data):
        length, space, _ = data[start : start + 12].partition(b" ")
        if not space or not length.isdigit() or int(length) <= len(length) + 1:
            break
        end = start + int(length)
        name, _, value = data[start + len(length) + 1 : end].removesuffix(b"\n").partition(b"=")
        if name in (b"path", b"size") or name.startswith(b"GNU.sparse."):
            key = (
                name.decode("ascii", "replace")
                if name in (b"path", b"size", b"GNU.sparse.name")
                else "sparse"
            )
            result[key] = value
        start = end
    return result


def _map_bytes(file: BinaryIO, path: Path, position: int, header: tarfile.TarInfo) -> int:
    """Return the bytes of an old sparse member's map that lie before its data."""
    if header.type != tarfile.GNUTYPE_SPARSE:
        return 0
    flag, count = _read(file, position - BLOCK + _EXTENDED, 1), 0
    while flag not in (b"\0", b""):
        flag = _read(file, position + count * BLOCK + 504, 1)
        if not flag:
            raise _damaged(path, position, "the map of a sparse member is cut off")
        count += 1
    return count * BLOCK


def _member(path: Path, position: int, data: int, header: tarfile.TarInfo, extensions: _Extensions) -> Member:
    values = extensions.values
    text = values.get("size")
    if text is not None and not (text.isdigit() and len(text) <= 20):
        raise _damaged(path, position, "a size that is no number")
    name = values.get("GNU.sparse.name", values.get("path"))
    if name is not None and len(name) > MAX_NAME_BYTES:
        raise _damaged(path, position, f"a name of {len(name):,} bytes; the limit is {MAX_NAME_BYTES:,}")
    is_sparse = header.type == tarfile.GNUTYPE_SPARSE or "sparse" in values or "GNU.sparse.name" in values
    size = header.size if text is None else int(text)
    return Member(_text(name) if name is not None else extensions.name or header.name, data, size, is_sparse)


def _read(file: BinaryIO, position: int, size: int) -> bytes:
    file.seek(position)
    return file.read(size)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode("utf-8", "surrogateescape")


def _damaged(path: Path, position: int, why: str) -> SourceError:
    return SourceError(f"{path} is damaged at byte {position}: {why}")
