"""Variant store: accepted variants on disk, for the next process on this machine.

    store = VariantStore(data_dir / "compiled", 2 << 30, log)
    folder = store.new_folder()
    ...                                             # build into folder.path
    key = store.keep(folder, record)
    for kept in store.find(model, environment):     # most recently used first
        store.check(kept)

# Note: [Kept variants]
A folder of the store is named by the key of its record, and has the files that the record names. It is built
under a temporary name in the same folder and renamed when everything is on the disk: a killed process leaves
nothing that passes for a variant. Every file is compared with its sha256 before OpenVINO reads it; a folder
that differs in anything is deleted. The digests detect damage, not an attacker who may write to the data
directory.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trocar_server.engine.compiled.variant_record import VariantRecord
from trocar_server.storage.durable import DamagedError, make_folder, open_regular, remove_quietly, sync_folder
from trocar_server.storage.sealed_record import read_record, write_record
from trocar_server.storage.temporary_folder import TemporaryFolder, remove_leftovers

_KIND = "variant"
_RECORD_FILE = "variant.json"
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class KeptVariant:
    """A variant on disk. Its files are unchecked."""

    folder: Path
    record: VariantRecord


class VariantStore:
    """Folder of kept variants; see Note: [Kept variants]. Any thread, and several processes.

    Args:
        root: The folder; it is created when the first variant is kept.
        max_bytes: The most bytes of files; the least recently used variants are removed.
        log: Logger; one line for each folder that is removed because it is damaged.
    """

    def __init__(self, root: Path, max_bytes: int, log: Any) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._log = log

    def clean(self) -> None:
        """Remove what killed processes left half-built."""
        remove_leftovers(self._root)

    def new_folder(self) -> TemporaryFolder:
        """Create a folder to build in; it vanishes with its process unless it is kept.

        Raises:
            OSError: It cannot be created.
        """
        make_folder(self._root)
        return TemporaryFolder(self._root)

    def keep(self, folder: TemporaryFolder, record: VariantRecord) -> str | None:
        """Keep a built folder, whose temporary name is gone afterwards; return its key.

        Args:
            folder: From `new_folder`. All of its files are kept.
            record: Without the digests of the files.

        Returns:
            The key; None for a folder that is larger than the store, which stays temporary.

        Raises:
            OSError: It cannot be written; the folder is as temporary as before.
        """
        files = {path.name: _written_digest(path) for path in sorted(folder.path.iterdir())}
        record = record.model_copy(update={"files": files})
        write_record(folder.path / _RECORD_FILE, _KIND, record)
        byte_count, target = _byte_count(folder.path), self._root / record.key
        if byte_count > self._max_bytes:
            return None
        self._remove(target)  # an equal one, of another process
        self._make_room(byte_count)
        try:
            folder.path.rename(target)
        except OSError as error:  # again an equal one
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        sync_folder(self._root)
        folder.cleanup()
        return record.key

    def has_any(self) -> bool:
        """Whether anything is kept."""
        return bool(self._folders())

    def find(self, model: str, environment: str) -> Sequence[KeptVariant]:
        """Return the kept variants of a model that were built in an equal environment, last used first.

        Folders that are damaged are removed.
        """
        result = []
        for folder in self._folders():
            try:
                record = read_record(folder / _RECORD_FILE, _KIND, VariantRecord)
                if record.key != folder.name:
                    raise DamagedError("it is not in its own folder")
            except (DamagedError, OSError) as error:
                self._discard(folder, error)
                continue
            if (record.model, record.environment) == (model, environment):
                result.append(KeptVariant(folder, record))
        return result

    def check(self, kept: KeptVariant) -> None:
        """Compare every file with its digest; remove a variant that differs.

        Raises:
            DamagedError: It differed.
        """
        try:
            names = {path.name for path in kept.folder.iterdir()}
            if names != {_RECORD_FILE, *kept.record.files}:
                raise DamagedError("files are missing, or there are others")
            for name, digest in kept.record.files.items():
                if _digest(kept.folder / name) != digest:
                    raise DamagedError(f"the sha256 of {name} does not match")
        except (DamagedError, OSError) as error:
            self._discard(kept.folder, error)
            raise DamagedError(_words(error)) from None

    def touch(self, key: str) -> None:
        """Note that a variant is in use."""
        with suppress(OSError):
            os.utime(self._root / key)

    def remove(self, key: str) -> None:
        """Remove a variant, if it is there."""
        self._remove(self._root / key)

    def _discard(self, folder: Path, error: Exception) -> None:
        self._log.warning("kept variant removed", key=folder.name[:12], problem=_words(error))
        self._remove(folder)

    def _remove(self, folder: Path) -> None:
        if folder.is_symlink() or folder.is_file():
            remove_quietly(folder)
            return
        remove_quietly(folder / _RECORD_FILE)  # without it the rest is no variant
        shutil.rmtree(folder, ignore_errors=True)

    def _make_room(self, byte_count: int) -> None:
        """Remove the variants used least recently until there is room for another one."""
        folders = self._folders()
        sizes = {folder: _byte_count(folder) for folder in folders}
        while folders and sum(sizes.values()) + byte_count > self._max_bytes:
            oldest = folders.pop()
            self._log.info("kept variant removed", key=oldest.name[:12], problem="no room")
            self._remove(oldest)
            del sizes[oldest]

    def _folders(self) -> list[Path]:
        """Return the folders named by a key, the last used one first. Whatever else is there stays."""
        times = {}
        with suppress(OSError):
            for entry in os.scandir(self._root):
                if _KEY.fullmatch(entry.name):
                    with suppress(OSError):
                        times[Path(entry.path)] = entry.stat(follow_symlinks=False).st_mtime_ns
        return sorted(times, key=lambda path: times[path], reverse=True)


def _words(error: Exception) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)


def _byte_count(folder: Path) -> int:
    count = 0
    with suppress(OSError):
        for entry in os.scandir(folder):
            count += entry.stat(follow_symlinks=False).st_size
    return count


def _digest(path: Path) -> str:
    return _read_digest(open_regular(path))


def _written_digest(path: Path) -> str:
    """Return the sha256 of a file, which is on the disk afterwards."""
    descriptor = open_regular(path)
    os.fsync(descriptor)
    return _read_digest(descriptor)


def _read_digest(descriptor: int) -> str:
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
