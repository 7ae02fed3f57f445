"""Edit list file: a sealed record of one line of JSON, the description and the tensors."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_type_hints

from trocar_server.storage.durable import DamagedError
from trocar_server.storage.sealed_record import SEAL_BYTES, seal, unseal

SUFFIX = ".edits"

_KIND = "edits"
_MAX_HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class Head:
    """Head of a file: its owner, independent of the file name, and the sizes of its parts."""

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
    return seal(_KIND, json.dumps(asdict(head)).encode() + b"\n", entry.description, entry.tensors)


def decoded(content: bytes) -> StoredEntry:
    """Read the content of a file.

    Raises:
        DamagedError: It is not as it was written.
    """
    body = unseal(_KIND, content)
    line = bytes(body[:_MAX_HEAD_BYTES]).partition(b"\n")[0]
    head, parts = _read_head(line), body[len(line) + 1 :]
    if head.description_bytes + head.tensor_bytes != len(parts):
        raise DamagedError("its size differs from the size in its header")
    description, tensors = parts[: head.description_bytes], parts[head.description_bytes :]
    return StoredEntry(
        head.principal, head.model_id, head.name, head.stored_at_s, bytes(description), bytes(tensors)
    )


def head_of(path: Path) -> Head:
    """Read the head of a file, without verifying the rest.

    Raises:
        DamagedError: The head is unreadable.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        file.readline(SEAL_BYTES + len(_KIND))
        return _read_head(file.readline(_MAX_HEAD_BYTES))


def _read_head(line: bytes) -> Head:
    try:
        head = Head(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        raise DamagedError("its header cannot be parsed") from None
    if any(type(value) is not _TYPES[name] for name, value in asdict(head).items()):
        raise DamagedError("its header has unexpected content")
    return head
