"""`manifest.json`: what an output is of, and which shards of it are complete.

It has no times and no durations, so that it is the same however often a run was stopped.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trocar._datasets.disk import write_whole
from trocar._datasets.open_shard import Failure
from trocar._datasets.schema import Schema
from trocar.errors import OutputError

NAME = "manifest.json"
_VERSION = 1
_SHARD_NAME = re.compile(r"features-\d{5,}(\.[a-z]+)?")


@dataclass(frozen=True)
class ShardEntry:
    """One complete shard."""

    name: str
    """A file or folder beside the manifest; empty where no sample of the shard has a row."""
    first: int
    """The index of its first sample in the source."""
    sample_count: int
    """With those that failed."""
    row_count: int
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Bytes and SHA-256 of every file, by path from the manifest's folder."""


@dataclass(frozen=True)
class Manifest:
    """What is known of an output."""

    job: Mapping[str, Any]
    """What decides the output's bytes: model, taps, source, batch, format."""
    schema: Schema | None = None
    shards: tuple[ShardEntry, ...] = ()
    failed: tuple[Failure, ...] = ()
    is_done: bool = False

    @property
    def sample_count(self) -> int:
        """How many samples of the source are behind the complete shards."""
        return sum(shard.sample_count for shard in self.shards)

    @property
    def row_count(self) -> int:
        """How many rows the complete shards have."""
        return sum(shard.row_count for shard in self.shards)

    @property
    def byte_count(self) -> int:
        """Bytes of all files of the complete shards."""
        return sum(int(file["bytes"]) for shard in self.shards for file in shard.files.values())

    def with_shard(self, shard: ShardEntry, schema: Schema | None, failed: tuple[Failure, ...]) -> "Manifest":
        """Return the manifest with one more shard."""
        return replace(self, schema=schema, shards=(*self.shards, shard), failed=self.failed + failed)

    def save(self, root: Path) -> None:
        """Write it; after a crash there is either the old or the new one."""
        schema = self.schema.to_json() if self.schema else None
        found = {
            "format_version": _VERSION,
            "is_done": self.is_done,
            "sample_count": self.sample_count,
            "row_count": self.row_count,
            "job": self.job,
            "schema": schema,
            "shards": [asdict(shard) for shard in self.shards],
            "failed": [asdict(failure) for failure in self.failed],
        }
        write_whole(root / NAME, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())


def load(root: Path) -> Manifest | None:
    """Read the manifest of an output; None where there is none.

    Raises:
        OutputError: It cannot be understood.
    """
    try:
        found = json.loads((root / NAME).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise OutputError(f"{root / NAME} is no JSON ({error}); choose another --out") from error
    try:
        return _parsed(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OutputError(
            f"{root / NAME} is no manifest of trocar, or of another version ({error!r}); choose another --out"
        ) from error


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Say where two descriptions of a job differ, one line for each."""
    before, after = dict(_flat(old)), dict(_flat(new))
    return [
        f"{name}: was {_shown(before, name)}, is now {_shown(after, name)}"
        for name in dict.fromkeys((*before, *after))
        if before.get(name, _MISSING) != after.get(name, _MISSING)
    ]


_MISSING = object()


def _parsed(found: Mapping[str, Any]) -> Manifest:
    if found["format_version"] != _VERSION:
        raise ValueError(f"format_version {found['format_version']}")
    shards = tuple(ShardEntry(**shard) for shard in found["shards"])
    for shard in shards:
        # Names in it are used to delete files: nothing but what this module writes may come through.
        if shard.name and not _SHARD_NAME.fullmatch(shard.name):
            raise ValueError(f"shard {shard.name!r}")
        if any(Path(file).parts[:1] != (shard.name,) or ".." in Path(file).parts for file in shard.files):
            raise ValueError(f"files of shard {shard.name!r}")
    return Manifest(
        job=dict(found["job"]),
        schema=Schema.from_json(found["schema"]) if found["schema"] else None,
        shards=shards,
        failed=tuple(Failure(**failure) for failure in found["failed"]),
        is_done=bool(found["is_done"]),
    )


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _shown(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], ensure_ascii=False) if name in values else "not there"
