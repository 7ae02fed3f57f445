"""What is known of one data set as a file: the sha256 of what follows, then JSON."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trocar_server.edit_store.files import write_durably
from trocar_server.training.datasets.form import (
    DatasetInfo,
    Manifest,
    SampleForm,
    form_from_json,
    form_to_json,
    manifest_from_json,
    manifest_to_json,
)

SUFFIX = ".dataset"

_MAGIC = b"trocar dataset 1 "
_DIGEST_CHARACTERS = 64


class DamagedRecordError(Exception):
    """A file is not as it was written."""


@dataclass(frozen=True)
class Record:
    """One data set, or an upload that is to be one."""

    principal: str
    """Whose it is, whatever folder it lies in."""
    dataset_id: str
    """Its id, whatever the file is called."""
    stored_at_s: float
    """Seconds since 1970."""
    manifest: Manifest
    """Its shards."""
    form: SampleForm | None = None
    """What its samples look like; None until it is committed."""

    def info(self) -> DatasetInfo:
        """Return what callers see of it."""
        return DatasetInfo(
            dataset_id=self.dataset_id,
            name=self.manifest.name,
            sample_count=self.manifest.sample_count,
            byte_count=sum(self.manifest.sizes().values()),
            categories=self.manifest.categories,
            form=self.form,
            stored_at_s=self.stored_at_s,
        )


def write_record(path: Path, record: Record) -> None:
    """Write a record such that after a crash it is there whole, or the old one is.

    Raises:
        OSError: `path` is as it was.
    """
    body = json.dumps(_to_json(record)).encode()
    write_durably(path, b"".join((_MAGIC, hashlib.sha256(body).hexdigest().encode(), b"\n", body)))


def read_record(path: Path) -> Record:
    """Read a record.

    Raises:
        DamagedRecordError: It is not as it was written.
        OSError: It cannot be read.
    """
    content = path.read_bytes()
    start = len(_MAGIC) + _DIGEST_CHARACTERS
    body = content[start + 1 :]
    digest = hashlib.sha256(body).hexdigest().encode()
    if not content.startswith(_MAGIC) or content[len(_MAGIC) : start + 1] != digest + b"\n":
        raise DamagedRecordError("its sha256 is another")
    try:
        return _from_json(json.loads(body))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DamagedRecordError("another version of the server wrote it") from None


def _to_json(record: Record) -> dict[str, Any]:
    return {
        "principal": record.principal,
        "dataset_id": record.dataset_id,
        "stored_at_s": record.stored_at_s,
        "manifest": manifest_to_json(record.manifest),
        "form": None if record.form is None else form_to_json(record.form),
    }


def _from_json(value: dict[str, Any]) -> Record:
    return Record(
        principal=str(value["principal"]),
        dataset_id=str(value["dataset_id"]),
        stored_at_s=float(value["stored_at_s"]),
        manifest=manifest_from_json(value["manifest"]),
        form=None if value["form"] is None else form_from_json(value["form"]),
    )
