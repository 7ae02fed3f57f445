"""Layout of the data set folder.

    FOLDER/incoming/*.partial                                  shards being received
    FOLDER/pool/<sha256>                                       every content once
    FOLDER/owners/<sha256 of the principal>/<id>.dataset       one record per data set
    FOLDER/owners/<sha256 of the principal>/shards/<sha256>    shards of this principal

Of what clients send, only ids and sha256 of pure hexadecimal digits become part of a path.
"""

import hashlib
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import is_unproven
from trocar_server.storage.disk_errors import storage_error
from trocar_server.storage.durable import DamagedError, sync_folder
from trocar_server.training.datasets.dataset_records import SUFFIX, DatasetRecord, read_record
from trocar_server.training.datasets.incoming import drop_unused

MAX_UNPROVEN = 256
"""The most principals with an unverified token that may store data; the limit affects only them."""

_ID = re.compile(r"[0-9a-f]{32}")
_log = structlog.get_logger("trocar")


class DatasetLayout:
    """Paths and contents of the folder. Methods may raise `OSError`; none takes a lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.incoming = folder / "incoming"
        self.pool = folder / "pool"
        self.owners = folder / "owners"

    def owner(self, principal: str) -> Path:
        """Return the folder of a principal."""
        return self.owners / hashlib.sha256(principal.encode("utf-8", "surrogatepass")).hexdigest()

    def own(self, principal: str, sha256: str) -> Path:
        """Return a principal's path of a shard."""
        return self.owner(principal) / "shards" / sha256

    def pooled(self, sha256: str) -> Path:
        """Return the path of a shard in the pool."""
        return self.pool / sha256

    def path(self, principal: str, dataset_id: str) -> Path:
        """Return the path of a data set's record.

        Raises:
            ServiceError: `UNKNOWN_DATASET`, the id is malformed.
        """
        if not _ID.fullmatch(dataset_id):
            raise unknown_dataset(dataset_id)
        return self.owner(principal) / f"{dataset_id}{SUFFIX}"

    def record(self, principal: str, dataset_id: str) -> DatasetRecord:
        """Return the record of a data set.

        Raises:
            ServiceError: `UNKNOWN_DATASET` if it is absent or another principal's; `DATASET_CORRUPT`.
        """
        try:
            record = read_record(self.path(principal, dataset_id))
        except FileNotFoundError:
            raise unknown_dataset(dataset_id) from None
        except DamagedError as error:
            raise damaged(str(error)) from None
        if (record.principal, record.dataset_id) != (principal, dataset_id):
            raise damaged("its file belongs to another data set")
        return record

    def records(self, principal: str) -> list[DatasetRecord]:
        """Return all readable records of a principal; see `unreadable` for the others."""
        result = []
        for path in sorted(self.owner(principal).glob(f"*{SUFFIX}")):
            try:
                record = read_record(path)
            except FileNotFoundError:  # deleted meanwhile
                continue
            except OSError as error:
                _log.warning("a stored data set cannot be read", file=path.name, problem=error.strerror)
                continue
            except DamagedError as error:
                _log.warning("a stored data set is damaged", file=path.name, problem=str(error))
                continue
            if record.principal == principal:
                result.append(record)
        return result

    def unreadable(self, principal: str) -> dict[str, str]:
        """Return the reasons why data sets of a principal cannot be read, by id."""
        result = {}
        for path in sorted(self.owner(principal).glob(f"*{SUFFIX}")):
            dataset_id = path.name.removesuffix(SUFFIX)
            try:
                self.record(principal, dataset_id)
            except ServiceError as error:
                if error.reason is not ErrorReason.UNKNOWN_DATASET:  # deleted meanwhile, or a foreign file
                    result[dataset_id] = error.message
            except OSError as error:
                result[dataset_id] = storage_error("data set", error).message
        return result

    def make_folders(self, principal: str) -> None:
        """Create the folders of a principal, durably.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`, too many principals store data.
        """
        owner = self.owner(principal)
        if (owner / "shards").is_dir():
            return
        for folder in (self.folder, self.incoming, self.pool, self.owners):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_new = is_unproven(principal) and not owner.is_dir()
        if is_new and self._unproven_count() >= MAX_UNPROVEN:
            raise ServiceError(
                ErrorReason.STORAGE_UNAVAILABLE,
                f"data sets of {MAX_UNPROVEN} unverified tokens are stored, the maximum; call without a "
                "token, or ask the operator to free space",
            )
        for folder in (owner, owner / "shards"):
            folder.mkdir(mode=0o700, exist_ok=True)
        for folder in (owner, self.owners, self.folder, self.folder.parent):
            sync_folder(folder)

    def _unproven_count(self) -> int:
        """Count the owners with unverified tokens, according to their records."""
        count = 0
        for owner in self.owners.iterdir():
            with suppress(DamagedError, OSError, StopIteration):
                count += is_unproven(read_record(next(owner.glob(f"*{SUFFIX}"))).principal)
        return count

    def drop_unused_shards(self, principal: str) -> None:
        """Remove the principal's unreferenced shards; none if any of the records cannot be read."""
        try:
            used = sizes(read_record(path) for path in self.owner(principal).glob(f"*{SUFFIX}"))
        except DamagedError:
            return
        for path in (self.owner(principal) / "shards").glob("*"):
            if path.name not in used:
                path.unlink(missing_ok=True)
                drop_unused(self.pooled(path.name))

    def drop_empty_folders(self, principal: str) -> None:
        """Remove the folders of a principal without data; an upload is data also before its first shard."""
        owner = self.owner(principal)
        with suppress(OSError):  # not empty
            if [path.name for path in owner.iterdir()] == ["shards"]:
                (owner / "shards").rmdir()
                owner.rmdir()


def sizes(records: Iterable[DatasetRecord]) -> dict[str, int]:
    """Return byte counts by content hash, for all contents that the records name."""
    return {digest: size for record in records for digest, size in record.manifest.sizes().items()}


def unknown_dataset(dataset_id: str) -> ServiceError:
    """Build the error for an absent or foreign data set: callers cannot distinguish these."""
    return ServiceError(
        ErrorReason.UNKNOWN_DATASET,
        f"you have no data set with the id '{dataset_id[:80]}'; `trocar datasets list` lists yours",
    )


def damaged(problem: str) -> ServiceError:
    """Build the error for an existing data set that cannot be read."""
    return ServiceError(
        ErrorReason.DATASET_CORRUPT,
        f"the stored data set is damaged: {problem}; delete it and upload it again",
    )
