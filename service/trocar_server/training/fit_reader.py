"""A data set as a fit reads it: batches on the model's device, the next one loaded meanwhile.

Reading and decoding happen on a thread that never calls torch; what makes tensors of it belongs to the thread
that owns torch, as every method but `close` does.
"""

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from trocar_server.models import HostedModel
from trocar_server.training.augmentations import Augmentation
from trocar_server.training.batch import Batch
from trocar_server.training.datasets.batches import check_dataset, to_batch
from trocar_server.training.datasets.reader import DatasetReader, LoadedSamples

_AHEAD = 2


class FitReader:
    """Reads one data set for one trainer.

    Args:
        reader: Of the data set.
        hosted: Has the preprocessing and the device.
        seed: Of the augmentations.

    Raises:
        ServiceError: What `check_dataset` raises: the model cannot take the inputs.
    """

    def __init__(self, reader: DatasetReader, hosted: HostedModel, seed: int) -> None:
        check_dataset(reader.info, hosted)
        self._reader, self._hosted, self._seed = reader, hosted, seed
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="trocar-samples")
        self._announced: dict[tuple[int, ...], Future[LoadedSamples]] = {}

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, as augmentations see it."""
        form = self._reader.info.form
        has_images = form is None or form.inputs is None or self._hosted.preprocessing is not None
        if form is None or form.inputs is None or (has_images and form.inputs.shape[-1:] == (3,)):
            return self._hosted.input_shape
        return form.inputs.shape

    def __len__(self) -> int:
        return len(self._reader)

    def batch(self, indices: Tensor, augmentation: Augmentation | None = None, epoch: int = 0) -> Batch:
        """Return samples as the model takes them, on its device.

        Raises:
            ServiceError: `DATASET_CORRUPT`, `DATASET_INVALID`, `INPUT_REJECTED`, `STORAGE_UNAVAILABLE`.
        """
        key = tuple(indices.tolist())
        waiting = self._announced.pop(key, None)
        loaded = self._reader.load(key) if waiting is None else waiting.result()
        return to_batch(
            loaded, self._reader.info, self._hosted, augmentation or None, seed=self._seed, epoch=epoch
        )

    def announce(self, indices: Tensor) -> None:
        """Say which batch will be asked for next."""
        key = tuple(indices.tolist())
        if key in self._announced:
            return
        while len(self._announced) >= _AHEAD:
            self._announced.pop(next(iter(self._announced))).cancel()
        self._announced[key] = self._executor.submit(self._reader.load, key)

    def labels(self, target: str) -> Collection[int] | None:
        """Return the different values of a target; None where it is not made of whole numbers."""
        form = self._reader.info.form
        if form is None:
            return None
        name = target if target in form.targets or len(form.targets) != 1 else next(iter(form.targets))
        found = form.targets.get(name)
        return None if found is None else found.labels

    def close(self) -> None:
        """Stop the thread and let go of files."""
        self._executor.shutdown(cancel_futures=True)
        self._reader.close()
