"""Where things are in the folder of all data sets.

    FOLDER/incoming/*.partial                                  shards on their way in
    FOLDER/pool/<sha256>                                       every content once
    FOLDER/owners/<sha256 of the principal>/<id>.dataset       what is known of each data set
    FOLDER/owners/<sha256 of the principal>/shards/<sha256>    what this principal has sent

No text of a client becomes part of a path, but ids and sha256 that are nothing but hexadecimal digits.
"""

import hashlib
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.edit_store.files import sync_folder
from trocar_server.errors import ServiceError
from trocar_server.training.datasets.incoming import drop_unused
from trocar_server.training.datasets.records import SUFFIX, DamagedRecordError, Record, read_record

MAX_PRINCIPALS = 256
"""Who have anything stored: without authentication, anybody can be as many as he likes."""

_ID = re.compile(r"[0-9a-f]{32}")
_log = structlog.get_logger("trocar")


class Layout:
    """Names and contents of the folder. Methods may raise `OSError`; none takes a lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.incoming = folder / "incoming"
        self.pool = folder / "pool"
        self.owners = folder / "owners"

    def owner(self, principal: str) -> Path:
        """Return the folder of a principal."""
        return self.owners / hashlib.sha256(principal.encode("utf-8", "surrogatepass")).hexdigest()

    def own(self, principal: str, sha256: str) -> Path:
        """Return a principal's name of a shard."""
        return self.owner(principal) / "shards" / sha256

    def pooled(self, sha256: str) -> Path:
        """Return the name of a shard among those of all principals."""
        return self.pool / sha256

    def path(self, principal: str, dataset_id: str) -> Path:
        """Return the file of a data set.

        Raises:
            ServiceError: `UNKNOWN_DATASET`, the id is none.
        """
        if not _ID.fullmatch(dataset_id):
            raise unknown_dataset()
        return self.owner(principal) / f"{dataset_id}{SUFFIX}"

    def record(self, principal: str, dataset_id: str) -> Record:
        """Return what is known of a data set.

        Raises:
            ServiceError: `UNKNOWN_DATASET` for what is absent or somebody else's; `DATASET_CORRUPT`.
        """
        try:
            record = read_record(self.path(principal, dataset_id))
        except FileNotFoundError:
            raise unknown_dataset() from None
        except DamagedRecordError as error:
            raise damaged(str(error)) from None
        if (record.principal, record.dataset_id) != (principal, dataset_id):
            raise damaged("its file is another's")
        return record

    def records(self, principal: str) -> list[Record]:
        """Return what is known of all data sets of a principal; damaged ones are logged and left out."""
        found = []
        for path in sorted(self.owner(principal).glob(f"*{SUFFIX}")):
            try:
                record = read_record(path)
            except FileNotFoundError:  # deleted meanwhile
                continue
            except DamagedRecordError as error:
                _log.warning("a stored data set is damaged", file=path.name, problem=str(error))
                continue
            if record.principal == principal:
                found.append(record)
        return found

    def make_folders(self, principal: str) -> None:
        """Make the folders of a principal, durably.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`, too many principals have something stored.
        """
        owner = self.owner(principal)
        if (owner / "shards").is_dir():
            return
        for folder in (self.folder, self.incoming, self.pool, self.owners):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not owner.is_dir() and sum(1 for _ in self.owners.iterdir()) >= MAX_PRINCIPALS:
            raise ServiceError(
                ErrorReason.STORAGE_UNAVAILABLE,
                f"data sets of {MAX_PRINCIPALS} callers are stored, the most there can be; ask the operator "
                "to make room",
            )
        for folder in (owner, owner / "shards"):
            folder.mkdir(mode=0o700, exist_ok=True)
        for folder in (owner, self.owners, self.folder, self.folder.parent):
            sync_folder(folder)

    def drop_unused_shards(self, principal: str) -> None:
        """Remove the principal's shards that nothing of his names; none where something cannot be read."""
        try:
            used = sizes(read_record(path) for path in self.owner(principal).glob(f"*{SUFFIX}"))
        except DamagedRecordError:
            return
        for path in (self.owner(principal) / "shards").glob("*"):
            if path.name not in used:
                path.unlink(missing_ok=True)
                drop_unused(self.pooled(path.name))

    def drop_empty_folders(self, principal: str) -> None:
        """Remove the folders of a principal who has nothing stored."""
        with suppress(OSError):  # there is something in them
            (self.owner(principal) / "shards").rmdir()
            self.owner(principal).rmdir()


def sizes(records: Iterable[Record]) -> dict[str, int]:
    """Return the bytes of every content that records name."""
    return {digest: size for record in records for digest, size in record.manifest.sizes().items()}


def unknown_dataset() -> ServiceError:
    """Build the error for what is absent or somebody else's: nobody can tell which."""
    return ServiceError(
        ErrorReason.UNKNOWN_DATASET, "you have no data set of this id; `datasets` lists those that you have"
    )


def damaged(problem: str) -> ServiceError:
    """Build the error for a data set that is there and cannot be read."""
    return ServiceError(
        ErrorReason.DATASET_CORRUPT,
        f"the stored data set is damaged: {problem}; delete it and upload it again",
    )
