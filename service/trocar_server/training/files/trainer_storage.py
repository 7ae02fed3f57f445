"""Trainer storage: all stores of one server, opened under an exclusive lock.

storage = TrainingStorage(data_dir, keep=5)     # `trocar serve`: fails if another server has it
storage.trainers, storage.checkpoints, storage.published

on_demand = StorageOnDemand(data_dir, keep=5)   # a local server: its data directory is shared
on_demand.get().trainers                        # opened with the first trainer; fails, and may be tried again

DATA_DIR/trainers/lock          held by the server that writes into `trainers` and `published`
DATA_DIR/trainers/<trainer id>/
DATA_DIR/published/<model id>/  read by every server at its start

On a cluster the trainers are in a folder that other servers can read, see `owner_folders`.
"""

from pathlib import Path
from threading import Lock

from trocar_server.storage.data_lock import LOCK_NAME, lock_folder
from trocar_server.storage.disk_errors import disk_errors
from trocar_server.training.files.checkpoints import CheckpointStore
from trocar_server.training.files.owner_folders import OwnerFolders
from trocar_server.training.files.published import PublishedStore
from trocar_server.training.files.step_journal import StepJournal
from trocar_server.training.files.trainer_janitor import (
    clean_trainer,
    clean_trainers,
    unfinished_checkpoints,
)
from trocar_server.training.files.trainer_store import TrainerStore


class TrainingStorage:
    """The stores of one server, which holds the lock until `close`. Leftovers of killed servers are removed.

    Args:
        data_dir: The server's data directory.
        keep: See `CheckpointStore`.
        keep_automatic: See `CheckpointStore`.
        owners: Folders of the trainers of several servers; one folder in the data directory when None.

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`, another server uses the data directory, or the disk fails.
    """

    def __init__(
        self, data_dir: Path, keep: int, keep_automatic: int = 2, owners: OwnerFolders | None = None
    ) -> None:
        trainers = data_dir / "trainers" if owners is None else owners.own
        self._owners = owners
        self._lock = lock_folder(trainers)
        try:
            self.unfinished = unfinished_checkpoints(trainers)
            """By trainer: numbers of tensors that no manifest names, newer than all that have one."""
            clean_trainers(trainers)
            self.trainers = TrainerStore(trainers, is_shared=owners is not None)
            self.journal = StepJournal(self.trainers)
            self.checkpoints = CheckpointStore(self.trainers, keep, keep_automatic)
            self.published = published_store(data_dir)
            self.published.clean()
        except BaseException:
            self._lock.release()
            raise

    def take_over(self, owner: str, trainer_id: str) -> bool:
        """Move a trainer of a lost server here; see `OwnerFolders.take_over`.

        Raises:
            ServiceError: As there.
        """
        assert self._owners is not None
        if not self._owners.take_over(owner, trainer_id):
            return False
        with disk_errors("folder of a trainer that is taken over"):
            self.unfinished |= unfinished_checkpoints(self._owners.own)
            clean_trainer(self._owners.own / trainer_id)
        return True

    def close(self) -> None:
        """Release the data directory."""
        self._lock.release()


class StorageOnDemand:
    """Storage that is opened on first use: a server without it serves everything but trainers.

    Args:
        data_dir: The server's data directory.
        keep: See `CheckpointStore`.
        keep_automatic: See `CheckpointStore`.
        owners: See `TrainingStorage`.
    """

    def __init__(
        self, data_dir: Path, keep: int, keep_automatic: int = 2, owners: OwnerFolders | None = None
    ) -> None:
        self._arguments = (data_dir, keep, keep_automatic, owners)
        self._guard = Lock()
        self._storage: TrainingStorage | None = None

    def get(self) -> TrainingStorage:
        """Return the storage; may block on the disk.

        Raises:
            ServiceError: As `TrainingStorage`; a later call tries again.
        """
        with self._guard:
            if self._storage is None:
                self._storage = TrainingStorage(*self._arguments)
            return self._storage

    def existing(self) -> TrainingStorage | None:
        """Return the storage if it is open or its folder has contents; None otherwise.

        Raises:
            ServiceError: As `TrainingStorage`.
        """
        folders = [self._arguments[0] / name for name in ("trainers", "published")]
        with disk_errors("folder of trainers"):
            is_needed = self._storage is not None or any(map(_holds_something, folders))
        return self.get() if is_needed else None

    def published_for_reading(self) -> PublishedStore:
        """Return the published models if the storage cannot be opened: reading takes no lock."""
        return published_store(self._arguments[0])

    def close(self) -> None:
        """Release the data directory, if it is open."""
        with self._guard:
            if self._storage is not None:
                self._storage.close()
                self._storage = None


def _holds_something(folder: Path) -> bool:
    """Whether a folder has more in it than the lock, which every `trocar serve` leaves there."""
    return folder.is_dir() and any(path.name != LOCK_NAME for path in folder.iterdir())


def published_store(data_dir: Path) -> PublishedStore:
    """Return the published models of a data directory, read-only: that needs no lock."""
    return PublishedStore(data_dir / "published")
