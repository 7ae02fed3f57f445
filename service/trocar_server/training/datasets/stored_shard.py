"""Stored shard: a data set's shard on disk."""

from dataclasses import dataclass
from pathlib import Path

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage.disk_errors import disk_errors
from trocar_server.training.datasets.dataset_schema import Shard
from trocar_server.training.datasets.incoming import drop_unused, is_whole


@dataclass(frozen=True)
class StoredShard:
    """One shard of a principal's data set."""

    path: Path
    """Path of the file."""
    shard: Shard
    """Its description in the manifest."""
    pooled: Path
    """Its path in the pool."""

    def check(self) -> None:
        """Compare its bytes with its sha256. A damaged file is removed, so that it can be uploaded again.

        Raises:
            ServiceError: `DATASET_CORRUPT` or `STORAGE_UNAVAILABLE`.
        """
        with disk_errors("data set"):
            if is_whole(self.path, self.shard):
                return
            self.path.unlink(missing_ok=True)
            drop_unused(self.pooled)
        raise ServiceError(
            ErrorReason.DATASET_CORRUPT,
            f"shard {self.shard.sha256[:12]} of the data set is missing or damaged; upload the data set "
            "again: only what is missing is sent, and it keeps its id",
        )
