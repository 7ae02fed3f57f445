"""Data set record: the metadata file of one data set, a sealed record."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trocar_server.storage.durable import DamagedError, read_whole, write_durably
from trocar_server.storage.sealed_record import seal, unseal
from trocar_server.training.datasets.dataset_schema import (
    DatasetInfo,
    Manifest,
    SampleSignature,
    manifest_from_json,
    manifest_to_json,
    signature_from_json,
    signature_to_json,
)

SUFFIX = ".dataset"
MAX_RECORD_BYTES = 512 << 20
"""Of one file: 100,000 categories of 200 characters are 240 MB in JSON, an emoji is 12 bytes."""

_KIND = "dataset"


@dataclass(frozen=True)
class DatasetRecord:
    """Record of one data set, or of an upload in progress."""

    principal: str
    """Its owner, independent of the folder that it is in."""
    dataset_id: str
    """Its id, independent of the file name."""
    stored_at_s: float
    """Seconds since 1970."""
    manifest: Manifest
    """Its shards."""
    signature: SampleSignature | None = None
    """Signature of its samples; None until it is committed."""

    def info(self) -> DatasetInfo:
        """Return the metadata that callers see."""
        return DatasetInfo(
            dataset_id=self.dataset_id,
            name=self.manifest.name,
            sample_count=self.manifest.sample_count,
            byte_count=sum(self.manifest.sizes().values()),
            categories=self.manifest.categories,
            signature=self.signature,
            stored_at_s=self.stored_at_s,
        )


def write_record(path: Path, record: DatasetRecord) -> None:
    """Write a record atomically: after a crash the file holds either the new or the old one.

    Raises:
        OSError: Writing failed; `path` is unchanged.
    """
    write_durably(path, seal(_KIND, json.dumps(_to_json(record)).encode()))


def read_record(path: Path) -> DatasetRecord:
    """Read a record.

    Raises:
        DamagedError: It differs from what was written.
        OSError: It cannot be read.
    """
    body = unseal(_KIND, read_whole(path, MAX_RECORD_BYTES))
    try:
        return _from_json(json.loads(bytes(body)))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DamagedError("it was written by another version of the server") from None


def _to_json(record: DatasetRecord) -> dict[str, Any]:
    return {
        "principal": record.principal,
        "dataset_id": record.dataset_id,
        "stored_at_s": record.stored_at_s,
        "manifest": manifest_to_json(record.manifest),
        "form": None if record.signature is None else signature_to_json(record.signature),
    }


def _from_json(value: dict[str, Any]) -> DatasetRecord:
    return DatasetRecord(
        principal=str(value["principal"]),
        dataset_id=str(value["dataset_id"]),
        stored_at_s=float(value["stored_at_s"]),
        manifest=manifest_from_json(value["manifest"]),
        signature=None if value["form"] is None else signature_from_json(value["form"]),
    )
