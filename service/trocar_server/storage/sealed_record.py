"""Sealed record: a file whose first line says its kind and the sha256 of the rest; most often JSON.

write_record(path, "checkpoint", manifest)
manifest = read_record(path, "checkpoint", Manifest)
write_durably(path, seal("edits", head, tensors))       # a body of other bytes
"""

import hashlib
import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage.durable import DamagedError, read_whole, write_durably

MAX_RECORD_BYTES = 64 << 20
"""Of one file."""
SEAL_BYTES = len("trocar  1 \n") + 64
"""Of the first line, without the name of the kind."""

_DIGEST_CHARACTERS = 64


class Record(BaseModel):
    """Content of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


AnyRecord = TypeVar("AnyRecord", bound=Record)


def write_record(path: Path, kind: str, record: Record) -> None:
    """Write a record durably; an existing file is replaced.

    Raises:
        ServiceError: `TRAINER_INVALID`, it is too large.
        OSError: As `write_durably`.
    """
    content = encoded(kind, record)
    if len(content) > MAX_RECORD_BYTES:
        raise ServiceError(
            ErrorReason.TRAINER_INVALID,
            f"the {kind} would be {len(content):,} bytes without its tensors, the limit is "
            f"{MAX_RECORD_BYTES:,}",
        )
    write_durably(path, content)


def read_record(path: Path, kind: str, record_type: type[AnyRecord]) -> AnyRecord:
    """Read a record.

    Raises:
        DamagedError: It is not as it was written.
        OSError: It cannot be read; `FileNotFoundError` where there is none.
    """
    return decoded(kind, record_type, read_whole(path, MAX_RECORD_BYTES))


def encoded(kind: str, record: Record) -> bytes:
    """Return the content of a file. Numbers that are not finite are kept, as `json` writes them."""
    return seal(kind, json.dumps(record.model_dump()).encode())


def decoded(kind: str, record_type: type[AnyRecord], content: bytes) -> AnyRecord:
    """Read the content of a file.

    Raises:
        DamagedError: It is not as it was written.
    """
    body = unseal(kind, content)
    try:
        return record_type.model_validate(json.loads(bytes(body)))
    except (ValidationError, ValueError, RecursionError):
        raise DamagedError("its content does not match its schema") from None


def seal(kind: str, *parts: bytes) -> bytes:
    """Return the parts of a body behind the line with their kind and sha256."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join((f"trocar {kind} 1 {digest.hexdigest()}\n".encode(), *parts))


def unseal(kind: str, content: bytes) -> memoryview:
    """Return the body of a sealed file, not copied.

    Raises:
        DamagedError: It is of another kind, or not as it was written.
    """
    prefix = f"trocar {kind} 1 ".encode()
    end = len(prefix) + _DIGEST_CHARACTERS
    if not content.startswith(prefix) or content[end : end + 1] != b"\n":
        raise DamagedError(f"it does not begin like a {kind}")
    body = memoryview(content)[end + 1 :]
    if hashlib.sha256(body).hexdigest().encode() != content[len(prefix) : end]:
        raise DamagedError("its sha256 does not match")
    return body
