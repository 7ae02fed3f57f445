"""An uploaded data set as a fit reads it: batches of tensors, the next one loaded meanwhile.

samples = DatasetSamples(library.open(principal, dataset_id), hosted, seed=spec.seed)
fit = Fit(core, samples, None, fit_spec, scratch_dir, checkpoint)
samples.close()
"""

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from trocar_server.models import HostedModel
from trocar_server.training.augmentations import Augmentation
from trocar_server.training.batch import Batch
from trocar_server.training.datasets.batches import check_dataset, to_batch
from trocar_server.training.datasets.form import TargetForm
from trocar_server.training.datasets.reader import DatasetReader, LoadedSamples, is_pixels


class DatasetSamples:
    """Reads a data set for a model. Files and images are read on a thread that never calls torch.

    Args:
        reader: Of the data set; closed with this.
        hosted: The model, for its preprocessing and its device.
        seed: The trainer's, for augmentations.

    Raises:
        ServiceError: The model cannot take what the data set has; see `check_dataset`.
    """

    def __init__(self, reader: DatasetReader, hosted: HostedModel, seed: int) -> None:
        check_dataset(reader.info, hosted)
        self._reader, self._hosted, self._seed = reader, hosted, seed
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="trocar-samples")
        self._ahead: tuple[tuple[int, ...], Future[LoadedSamples]] | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, as augmentations see it."""
        inputs = self._reader.info.form.inputs if self._reader.info.form else None
        if inputs is None or (is_pixels(inputs) and self._hosted.preprocessing is not None):
            return self._hosted.input_shape
        return inputs.shape

    def __len__(self) -> int:
        return len(self._reader)

    def batch(self, indices: Tensor, augmentation: Augmentation | None = None, epoch: int = 0) -> Batch:
        """Return samples on the model's device, augmented as in an epoch.

        Raises:
            ServiceError: `DATASET_CORRUPT`, `STORAGE_UNAVAILABLE` and others; see `DatasetReader.load`.
        """
        loaded = self._loaded(tuple(indices.tolist()))
        info = self._reader.info
        return to_batch(loaded, info, self._hosted, augmentation, seed=self._seed, epoch=epoch)

    def announce(self, indices: Tensor) -> None:
        """Begin to load a batch; what was announced before and never asked for is dropped."""
        wanted = tuple(indices.tolist())
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._ahead = (wanted, self._executor.submit(self._reader.load, wanted))

    def labels(self, target: str) -> Collection[int] | None:
        """Return the different values of a target; of very many the smallest and the largest."""
        found = self._target(target)
        if found is None or found.low is None or found.high is None:
            return None
        return found.labels if found.labels is not None else (found.low, found.high)

    def close(self) -> None:
        """Let go of the thread and of files."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._reader.close()

    def _loaded(self, wanted: tuple[int, ...]) -> LoadedSamples:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == wanted:
            return ahead[1].result()
        return self._reader.load(wanted)

    def _target(self, name: str) -> TargetForm | None:
        form = self._reader.info.form
        if form is None:
            return None
        if not name and len(form.targets) == 1:
            return next(iter(form.targets.values()))
        return form.targets.get(name)
