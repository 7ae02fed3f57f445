"""Output folder: complete shards, the manifest that lists them, and the shard in progress."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trocar._base.replacement import PART
from trocar._export import disk, manifest
from trocar._export.manifest import Manifest, ShardEntry
from trocar._export.open_shard import OpenShard, Rows, remove_open_shard
from trocar._export.schema import Schema
from trocar._export.writers.shard_writer import ShardContent, ShardFormat
from trocar.errors import OutputError

_UNFINISHED = re.compile(
    rf"\.?(features-\d{{5,}}(\.[a-z]+)?|{re.escape(manifest.NAME)})(\.[0-9a-f]{{32}})?{re.escape(PART)}"
)


class Output:
    """Takes batches of rows, in order, and turns them into shards; made by `open_output`.

    Args:
        root: The folder.
        known: The complete shards.
        format: File format of shards.
        shard_size: The most samples in a shard, failed ones included.
        batch_size: The most samples in a batch: a shard ends where another one might not fit.
    """

    def __init__(
        self, root: Path, known: Manifest, format: ShardFormat, *, shard_size: int, batch_size: int
    ) -> None:
        self.root = root
        self.manifest = known
        self._format = format
        self._shard_size = shard_size
        self._batch_size = batch_size
        self._shard = self._next_shard()

    @property
    def position(self) -> int:
        """The index of the first sample that is not on disk yet."""
        return self._shard.first + self._shard.sample_count

    @property
    def schema(self) -> Schema | None:
        """Schema of the rows; None before the first batch."""
        return self._shard.schema

    @property
    def failed_count(self) -> int:
        """Number of samples without a row."""
        return len(self.manifest.failed) + len(self._shard.failed)

    def start(self, schema: Schema) -> None:
        """Set the schema, before the first rows.

        Raises:
            OutputError: The format cannot hold them.
        """
        self._format.check(schema)
        self._shard.start(schema)

    def append(self, rows: Rows) -> None:
        """Add the rows of the next batch; a shard that is full becomes a file."""
        self._shard.append(rows)
        self.complete_if_full()

    def complete_if_full(self) -> None:
        """Write the shard if no other batch would fit; also one left full by a kill."""
        if self._shard.sample_count and self._shard.sample_count + self._batch_size > self._shard_size:
            self._complete()

    def finish(self) -> None:
        """Write the last shard, and record the end."""
        if self._shard.sample_count:
            self._complete()
        self._shard.remove()
        self.manifest = replace(self.manifest, is_done=True)
        self.manifest.save(self.root)

    def close(self) -> None:
        """Close the files; a later run resumes from here."""
        self._shard.close()

    def _next_shard(self) -> OpenShard:
        known = self.manifest
        shard = OpenShard(self.root, len(known.shards), known.sample_count, known.schema)
        if not known.is_done:
            shard.open()
        return shard

    def _complete(self) -> None:
        done = self._shard
        name = f"features-{done.number:05}{self._format.suffix}" if done.keys else ""
        if name and done.schema is not None:
            # A run that was killed before it recorded the shard may have left one of that name.
            self._format.write(self.root / name, ShardContent(done.schema, done.arrays(), done.keys))
        files = {
            path.relative_to(self.root).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": disk.sha256(path),
            }
            for path in (disk.files_in(self.root / name) if name else ())
        }
        entry = ShardEntry(name, done.first, done.sample_count, len(done.keys), files)
        self.manifest = self.manifest.with_shard(entry, done.schema, tuple(done.failed))
        self.manifest.save(self.root)
        done.remove()
        self._shard = self._next_shard()


@contextmanager
def open_output(
    root: Path, job: Mapping[str, Any], format: ShardFormat, *, is_restart: bool = False
) -> Iterator[Output]:
    """Open a folder to write to, or to resume; locked against other processes.

    Args:
        root: Created if missing.
        job: Settings that determine the output's bytes; `batch` and `shard_size` are in it.
        format: File format of shards.
        is_restart: Whether existing output is deleted: only files that its manifest names.

    Raises:
        OutputError: The folder has other content, another job's output, or is in use.
    """
    root.mkdir(parents=True, exist_ok=True)
    with disk.locked(root):
        known = manifest.load(root)
        if known is None:
            _check_empty(root)
        elif is_restart:
            _throw_away(root, known)
            known = None
        _clean(root)
        if known is None:
            known = Manifest(job)
            known.save(root)
        if known.job != job and _is_unbegun(root, known):
            known = Manifest(job)  # as after a selector with a typing error: nothing is lost
            known.save(root)
            remove_open_shard(root)
        _check_same(root, known, job)
        output = Output(root, known, format, shard_size=job["shard_size"], batch_size=job["batch"])
        try:
            yield output
        finally:
            output.close()


def _check_empty(root: Path) -> None:
    # The very first manifest may have been cut short by a kill.
    result = sorted(path.name for path in root.iterdir() if not _UNFINISHED.fullmatch(path.name))
    if result:
        names = ", ".join(result[:3]) + (" and more" if len(result) > 3 else "")
        raise OutputError(f"{root} holds {names}, but no {manifest.NAME}; give an empty or a new folder")


def _is_unbegun(root: Path, known: Manifest) -> bool:
    """Whether no batch is on disk yet."""
    if known.shards or known.is_done:
        return False
    shard = OpenShard(root, 0, 0, None)
    shard.open()
    shard.close()
    return not shard.sample_count


def _check_same(root: Path, known: Manifest, job: Mapping[str, Any]) -> None:
    differences = manifest.differences(known.job, job)
    if differences:
        lines = "".join(f"\n  {line}" for line in differences)
        raise OutputError(
            f"{root} is the output of a run with other settings; --restart deletes it, another --out "
            f"keeps it:{lines}"
        )
    for shard in known.shards:
        for name, entry in shard.files.items():
            path = root / name
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise OutputError(f"{path} is missing or was changed; use --restart to start again")


def _throw_away(root: Path, known: Manifest) -> None:
    # The manifest is deleted last: after a kill it still lists the files to delete.
    for shard in known.shards:
        if shard.name:
            disk.remove(root / shard.name)
    remove_open_shard(root)
    (root / manifest.NAME).unlink()


def _clean(root: Path) -> None:
    """Delete unfinished files of a killed run."""
    for path in root.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            disk.remove(path)
