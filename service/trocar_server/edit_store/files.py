"""One list of edits as a file: the sha256 of what follows, one line of JSON, the description, the tensors.

It is written as `durable` says: all or nothing.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_type_hints

from trocar_server.durable import DamagedError

SUFFIX = ".edits"

_MAGIC = b"trocar edits 1 "
_DIGEST_CHARACTERS = 64
_MAX_HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class Head:
    """Whose file it is, whatever the file is called, and where its parts end."""

    principal: str
    model_id: str
    name: str
    stored_at_s: float
    description_bytes: int
    tensor_bytes: int


_TYPES = get_type_hints(Head)


@dataclass(frozen=True)
class StoredEntry:
    """One list."""

    principal: str
    model_id: str
    name: str
    stored_at_s: float
    """Seconds since 1970."""
    description: bytes
    tensors: bytes


def encoded(entry: StoredEntry) -> bytes:
    """Return the content of a file."""
    sizes = (len(entry.description), len(entry.tensors))
    head = Head(entry.principal, entry.model_id, entry.name, entry.stored_at_s, *sizes)
    body = b"".join((json.dumps(asdict(head)).encode(), b"\n", entry.description, entry.tensors))
    return b"".join((_MAGIC, hashlib.sha256(body).hexdigest().encode(), b"\n", body))


def decoded(content: bytes) -> StoredEntry:
    """Read the content of a file.

    Raises:
        DamagedError: It is not as it was written.
    """
    start = len(_MAGIC) + _DIGEST_CHARACTERS
    if not content.startswith(_MAGIC) or content[start : start + 1] != b"\n":
        raise DamagedError("it does not begin as such a file does")
    body = memoryview(content)[start + 1 :]
    if hashlib.sha256(body).hexdigest().encode() != content[len(_MAGIC) : start]:
        raise DamagedError("its sha256 is another")
    line = content[start + 1 : start + 1 + _MAX_HEAD_BYTES].partition(b"\n")[0]
    head, parts = _read_head(line), body[len(line) + 1 :]
    if head.description_bytes + head.tensor_bytes != len(parts):
        raise DamagedError("it is longer or shorter than it says")
    description, tensors = parts[: head.description_bytes], parts[head.description_bytes :]
    return StoredEntry(
        head.principal, head.model_id, head.name, head.stored_at_s, bytes(description), bytes(tensors)
    )


def head_of(path: Path) -> Head:
    """Read what a file says of itself, without looking whether the rest is as it was written.

    Raises:
        DamagedError: It says nothing that can be read.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        file.readline(len(_MAGIC) + _DIGEST_CHARACTERS + 1)
        return _read_head(file.readline(_MAX_HEAD_BYTES))


def _read_head(line: bytes) -> Head:
    try:
        head = Head(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        raise DamagedError("its first lines cannot be read") from None
    if any(type(value) is not _TYPES[name] for name, value in asdict(head).items()):
        raise DamagedError("its first lines say something else than they should")
    return head
