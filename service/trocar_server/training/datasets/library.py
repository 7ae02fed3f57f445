"""All data sets that a principal can train on: his own, and those that the operator listed."""

from collections.abc import Mapping

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.datasets.form import DatasetInfo
from trocar_server.training.datasets.listed import ListedFolder
from trocar_server.training.datasets.reader import DatasetReader
from trocar_server.training.datasets.sources import SampleSource, ShardSource
from trocar_server.training.datasets.store import DatasetStore


class DatasetLibrary:
    """Finds data sets by id, for one principal at a time; methods may block on the disk.

    Args:
        store: Those that were uploaded.
        listed: Those of the operator, by name.
        max_pixels: Of one encoded image.
    """

    def __init__(self, store: DatasetStore, listed: Mapping[str, ListedFolder], max_pixels: int) -> None:
        self.store = store
        self._listed = listed
        self._max_pixels = max_pixels

    def replace_listed(self, listed: Mapping[str, ListedFolder]) -> None:
        """Offer other data sets of the operator; readers that are open go on."""
        self._listed = listed

    def set_limits(self, max_bytes: int, max_pixels: int) -> None:
        """Change what uploads may not exceed, for those to come."""
        self._max_pixels = max_pixels
        self.store.set_limits(max_bytes, max_pixels)

    def entries(self, principal: str) -> list[DatasetInfo]:
        """Return the operator's by name, then the principal's own.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        return [*(folder.info for folder in self._listed.values()), *self.store.entries(principal)]

    def get(self, principal: str, dataset_id: str) -> DatasetInfo:
        """Return one data set or upload.

        Raises:
            ServiceError: `UNKNOWN_DATASET`, `DATASET_CORRUPT` or `STORAGE_UNAVAILABLE`.
        """
        folder = self._listed.get(dataset_id)
        return self.store.get(principal, dataset_id) if folder is None else folder.info

    def delete(self, principal: str, dataset_id: str) -> None:
        """Delete one of the principal's own.

        Raises:
            ServiceError: `UNKNOWN_DATASET`, `STORAGE_UNAVAILABLE`; `INVALID_ARGUMENT` for the operator's.
        """
        if dataset_id in self._listed:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                f"data set '{dataset_id}' is the operator's; only he can take it off his configuration",
            )
        self.store.delete(principal, dataset_id)

    def open(self, principal: str, dataset_id: str) -> DatasetReader:
        """Return a reader of a data set; close it in the end.

        Raises:
            ServiceError: `UNKNOWN_DATASET`; `DATASET_INVALID`, it is still being uploaded; `DATASET_CORRUPT`
                or `STORAGE_UNAVAILABLE`.
        """
        info = self.get(principal, dataset_id)
        source: SampleSource
        if dataset_id in self._listed:
            source = self._listed[dataset_id].source
        else:
            shards = self.store.shards(principal, dataset_id)
            info = self.store.get(principal, dataset_id)
            assert info.form is not None  # `shards` refuses what is not complete
            source = ShardSource(shards, info.form)
        return DatasetReader(source, info, self._max_pixels)
