"""Manifest (`manifest.json`): the description of an output and its complete shards.

It has no times and no durations, so that it does not depend on how often a run was stopped.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trocar._base.names import shortened
from trocar._base.replacement import write_file
from trocar._export.open_shard import Failure
from trocar._export.schema import Schema
from trocar.errors import OutputError

NAME = "manifest.json"
_VERSION = 1
_DIGEST, _PARTS = "model.digest", "model.parts."
_OLDER = "model: an earlier version began this folder, and did not note all that decides the model's values"
_MOST_DIFFERENCES = 8
_MOST_CHARACTERS = 1_000
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
    """Manifest of an output."""

    job: Mapping[str, Any]
    """What decides the output's bytes: model, taps, source, batch, format."""
    schema: Schema | None = None
    shards: tuple[ShardEntry, ...] = ()
    failed: tuple[Failure, ...] = ()
    is_done: bool = False

    @property
    def sample_count(self) -> int:
        """Number of source samples covered by the complete shards."""
        return sum(shard.sample_count for shard in self.shards)

    @property
    def row_count(self) -> int:
        """Number of rows of the complete shards."""
        return sum(shard.row_count for shard in self.shards)

    @property
    def byte_count(self) -> int:
        """Bytes of all files of the complete shards."""
        return sum(int(file["bytes"]) for shard in self.shards for file in shard.files.values())

    def with_shard(self, shard: ShardEntry, schema: Schema | None, failed: tuple[Failure, ...]) -> "Manifest":
        """Return the manifest with one more shard."""
        return replace(self, schema=schema, shards=(*self.shards, shard), failed=self.failed + failed)

    def save(self, root: Path) -> None:
        """Write it atomically: after a crash it is either the old or the new one."""
        schema = self.schema.to_json() if self.schema else None
        result = {
            "format_version": _VERSION,
            "is_done": self.is_done,
            "sample_count": self.sample_count,
            "row_count": self.row_count,
            "job": self.job,
            "schema": schema,
            "shards": [asdict(shard) for shard in self.shards],
            "failed": [asdict(failure) for failure in self.failed],
        }
        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        # A message may hold a path that is no UTF-8: its lone surrogates become JSON's escapes.
        write_file(root / NAME, text.encode("utf-8", "backslashreplace"), is_durable=True)


def load(root: Path) -> Manifest | None:
    """Read the manifest of an output; None without one.

    Raises:
        OutputError: It cannot be understood.
    """
    try:
        result = json.loads((root / NAME).read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise OutputError(f"{root / NAME} is not JSON ({shortened(error)}); choose another --out") from error
    try:
        return _parsed(result)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise OutputError(
            f"{root / NAME} is not a trocar manifest, or one of another version ({shortened(repr(error))}); "
            "choose another --out"
        ) from error


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List differences of two job descriptions: a line for each of the first, and a count of the others.

    Of two models the parts that differ are named, in place of their digests.
    """
    model = old.get("model")
    if isinstance(model, Mapping) and "architecture" in model and "parts" not in model:
        return [_OLDER]
    before, after = dict(_flat(old)), dict(_flat(new))
    names = [
        name
        for name in dict.fromkeys((*before, *after))
        if before.get(name, _MISSING) != after.get(name, _MISSING)
    ]
    parts = [name for name in names if name.startswith(_PARTS)]
    others = [name for name in names if name not in parts and not (parts and name == _DIGEST)]
    lines = [f"model: other {', '.join(name.removeprefix(_PARTS) for name in parts)}"] if parts else []
    lines += [
        f"{shortened(name)}: was {_shown(before, name)}, is now {_shown(after, name)}"
        for name in others[: _MOST_DIFFERENCES - len(lines)]
    ]
    left = len(others) + bool(parts) - len(lines)
    return [*lines, f"and {left:,} more"] if left else lines


_MISSING = object()


def _parsed(outcome: Mapping[str, Any]) -> Manifest:
    if outcome["format_version"] != _VERSION:
        raise ValueError(f"format_version {outcome['format_version']}")
    shards = tuple(ShardEntry(**shard) for shard in outcome["shards"])
    _check_counts(shards)
    for shard in shards:
        # Names in it are used to delete files: only names that this module writes are accepted.
        if shard.name and not _SHARD_NAME.fullmatch(shard.name):
            raise ValueError(f"shard {shard.name!r}")
        if any(Path(file).parts[:1] != (shard.name,) or ".." in Path(file).parts for file in shard.files):
            raise ValueError(f"files of shard {shard.name!r}")
    return Manifest(
        job=dict(outcome["job"]),
        schema=Schema.from_json(outcome["schema"]) if outcome["schema"] else None,
        shards=shards,
        failed=tuple(Failure.from_json(failure) for failure in outcome["failed"]),
        is_done=bool(outcome["is_done"]),
    )


def _check_counts(shards: Sequence[ShardEntry]) -> None:
    """Check the fields for resuming: shards are consecutive, and files have a size and a hash."""
    first = 0
    for shard in shards:
        counts = (shard.first, shard.sample_count, shard.row_count)
        if any(type(count) is not int for count in counts) or shard.first != first:
            raise ValueError(f"the samples of shard {shard.name!r}")
        if not 0 <= shard.row_count <= shard.sample_count or not shard.sample_count:
            raise ValueError(f"the rows of shard {shard.name!r}")
        for entry in shard.files.values():
            if type(entry["bytes"]) is not int or entry["bytes"] < 0 or type(entry["sha256"]) is not str:
                raise ValueError(f"files of shard {shard.name!r}")
        first += shard.sample_count


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _shown(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "not there"
    return shortened(json.dumps(values[name], ensure_ascii=False), _MOST_CHARACTERS)
