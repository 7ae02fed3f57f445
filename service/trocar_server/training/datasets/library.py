"""Data set library: a principal's own data sets and those that the operator listed."""

from collections.abc import Callable, Mapping

from PIL import Image

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.datasets.dataset_schema import DatasetInfo
from trocar_server.training.datasets.dataset_store import DatasetStore
from trocar_server.training.datasets.listed import ListedFolder
from trocar_server.training.datasets.reader import DatasetReader
from trocar_server.training.datasets.sample_sources import SampleSource, ShardSource


class DatasetLibrary:
    """Finds data sets by id, for one principal at a time; methods may block on the disk.

    Args:
        store: Uploaded data sets.
        listed: The operator's data sets, by name.
        max_pixels: The most pixels of one encoded image.
        decode: Decodes an image for a principal; called with the image, the most pixels, the principal. None
            decodes on the reading thread.
    """

    def __init__(
        self,
        store: DatasetStore,
        listed: Mapping[str, ListedFolder],
        max_pixels: int,
        decode: Callable[[bytes, int, str], Image.Image] | None = None,
    ) -> None:
        self._decode = decode
        self.store = store
        self._listed = listed
        self._max_pixels = max_pixels

    def replace_listed(self, listed: Mapping[str, ListedFolder]) -> None:
        """Replace the operator's data sets; open readers stay valid."""
        self._listed = listed

    def set_limits(self, max_bytes: int, max_pixels: int) -> None:
        """Change the limits of future uploads."""
        self._max_pixels = max_pixels
        self.store.set_limits(max_bytes, max_pixels)

    def entries(self, principal: str) -> list[DatasetInfo]:
        """Return the operator's data sets by name, then the principal's own.

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
        """Delete one of the principal's own data sets.

        Raises:
            ServiceError: `UNKNOWN_DATASET`, `STORAGE_UNAVAILABLE`; `INVALID_ARGUMENT` for the operator's.
        """
        if dataset_id in self._listed:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                f"data set '{dataset_id}' belongs to the server's configuration; only its operator can "
                "remove it",
            )
        self.store.delete(principal, dataset_id)

    def open(self, principal: str, dataset_id: str) -> DatasetReader:
        """Return a reader of a data set; the caller closes it.

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
            assert info.signature is not None  # `shards` refuses incomplete data sets
            source = ShardSource(shards, info.signature)
        decode = self._decode
        if decode is None:
            return DatasetReader(source, info, self._max_pixels)
        return DatasetReader(source, info, self._max_pixels, lambda data, most: decode(data, most, principal))
