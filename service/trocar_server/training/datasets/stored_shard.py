"""A shard of a data set that is on disk."""

from dataclasses import dataclass
from pathlib import Path

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.datasets.disk import disk_errors
from trocar_server.training.datasets.form import Shard
from trocar_server.training.datasets.incoming import drop_unused, is_whole


@dataclass(frozen=True)
class StoredShard:
    """One shard of somebody's data set."""

    path: Path
    """Where it is."""
    shard: Shard
    """What it has to be."""
    pooled: Path
    """Its name among those of all principals."""

    def check(self) -> None:
        """Compare its bytes with its sha256. What is damaged is removed, so that it can be sent again.

        Raises:
            ServiceError: `DATASET_CORRUPT` or `STORAGE_UNAVAILABLE`.
        """
        with disk_errors():
            if is_whole(self.path, self.shard):
                return
            self.path.unlink(missing_ok=True)
            drop_unused(self.pooled)
        raise ServiceError(
            ErrorReason.DATASET_CORRUPT,
            f"shard {self.shard.sha256[:12]} of the data set is missing or damaged; upload the data set "
            "again: only what is missing is sent, and it keeps its id",
        )
