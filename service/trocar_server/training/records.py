"""Small files of JSON with a seal: a first line with the sha256 of the rest.

write_record(path, "checkpoint", manifest)
manifest = read_record(path, "checkpoint", Manifest)
"""

import hashlib
import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from trocar_api.reasons import ErrorReason
from trocar_server.durable import DamagedError, read_whole, write_durably
from trocar_server.errors import ServiceError

MAX_RECORD_BYTES = 64 << 20
"""Of one file."""


class Record(BaseModel):
    """What a file says."""

    model_config = ConfigDict(frozen=True, extra="forbid")


AnyRecord = TypeVar("AnyRecord", bound=Record)


def write_record(path: Path, kind: str, record: Record) -> None:
    """Write a record durably; what is there is replaced.

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


def read_record(path: Path, kind: str, form: type[AnyRecord]) -> AnyRecord:
    """Read a record.

    Raises:
        DamagedError: It is not as it was written.
        OSError: It cannot be read; `FileNotFoundError` where there is none.
    """
    return decoded(kind, form, read_whole(path, MAX_RECORD_BYTES))


def encoded(kind: str, record: Record) -> bytes:
    """Return the content of a file. Numbers that are not finite are kept, as `json` writes them."""
    body = json.dumps(record.model_dump()).encode()
    return _seal(kind, body) + body


def decoded(kind: str, form: type[AnyRecord], content: bytes) -> AnyRecord:
    """Read the content of a file.

    Raises:
        DamagedError: It is not as it was written.
    """
    line, _, body = content.partition(b"\n")
    if line + b"\n" != _seal(kind, body):
        raise DamagedError("its sha256 is another")
    try:
        return form.model_validate(json.loads(body))
    except (ValidationError, ValueError, RecursionError):
        raise DamagedError("it says something else than it should") from None


def _seal(kind: str, body: bytes) -> bytes:
    return f"trocar {kind} 1 {hashlib.sha256(body).hexdigest()}\n".encode()
