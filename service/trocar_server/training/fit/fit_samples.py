"""Fit samples: an uploaded data set as batches of tensors, with prefetch of the next batch.

samples = DatasetSamples(library.open(principal, dataset_id), hosted, seed=spec.seed)
fit = Fit(core, samples, None, fit_spec, scratch_dir, checkpoint)
samples.close()
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.processor import Processed
from trocar_server.engine.request.plan import Payload
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel
from trocar_server.processing.inputs import (
    AudioInput,
    AudioSpec,
    ProcessorInput,
    TextEntry,
    TextInput,
    TextOptions,
)
from trocar_server.training.datasets.batch_assembly import check_dataset, to_batch, to_processed_batch
from trocar_server.training.datasets.dataset_schema import TargetSignature
from trocar_server.training.datasets.reader import DatasetReader, LoadedSamples, is_pixels
from trocar_server.training.datasets.stored_sound import Clips
from trocar_server.training.fit.augmentations import Augmentation
from trocar_server.training.losses.batch import Batch
from trocar_server.training.spec.trainer_spec import LossSpec


@dataclass(frozen=True)
class InputProcessing:
    """Processing of a fit's texts and sound.

    Attributes:
        process: Runs a model's tokenizer or feature extractor; blocks, on any thread but the event loop's.
        options: Options of the tokenization.
        losses: The terms of the trainer's loss, for labels of tokens.
    """

    process: Callable[[HostedModel, ProcessorInput, Sequence[Payload]], Processed]
    options: TextOptions
    losses: tuple[LossSpec, ...]


KEPT_BYTES = 256 << 20
"""Memory for the samples of an evaluation set, so that later epochs neither read nor decode them again."""

_Loaded: TypeAlias = tuple[LoadedSamples, tuple[ProcessorInput, Processed] | None]
"""Samples; and, of texts and sound, these and what the model's processor made of them."""


class DatasetSamples:
    """Reads a data set for a model. Files and images are read on a thread that never calls torch.

    Args:
        reader: Reader of the data set; closed with this object.
        hosted: The model, for its preprocessing and its device.
        seed: The trainer's seed, for augmentations.
        processing: Processing of a data set of texts or sound; not needed for others.
        kept_bytes: Memory for samples that were read, by batch; 0 to read them whenever they are needed.
        check: Refuses a batch that cannot be run.

    Raises:
        ServiceError: The model cannot take the data set's samples; see `check_dataset`.
    """

    def __init__(
        self,
        reader: DatasetReader,
        hosted: HostedModel,
        seed: int,
        processing: InputProcessing | None = None,
        kept_bytes: int = 0,
        check: Callable[[Batch], None] = lambda _: None,
    ) -> None:
        self._check = check
        check_dataset(reader.info, hosted)
        self._kept: dict[tuple[int, ...], LoadedSamples] = {}
        self._free_bytes = kept_bytes
        self._reader, self._hosted, self._seed, self._processing = reader, hosted, seed, processing
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="trocar-samples")
        self._prefetched: tuple[tuple[int, ...], Future[_Loaded]] | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, as augmentations receive it; () for texts and sound."""
        signature = self._reader.info.signature
        if signature is not None and (signature.is_text or signature.is_sound):
            return ()
        inputs = signature.inputs if signature else None
        if inputs is None or (is_pixels(inputs) and self._hosted.preprocessing is not None):
            return self._hosted.input_shape
        return inputs.shape

    @property
    def categories(self) -> tuple[str, ...]:
        """Names of the classes by label; empty when unknown."""
        return self._reader.info.categories

    def __len__(self) -> int:
        return len(self._reader)

    def batch(self, indices: Tensor, augmentation: Augmentation | None = None, epoch: int = 0) -> Batch:
        """Return samples on the model's device, augmented for an epoch.

        Raises:
            ServiceError: `DATASET_CORRUPT`, `STORAGE_UNAVAILABLE` and others, see `DatasetReader.load`; or as
                `check` raises.
        """
        loaded, tokenized = self._loaded(tuple(indices.tolist()))
        info = self._reader.info
        if tokenized is not None and self._processing is not None:
            batch = to_processed_batch(loaded, *tokenized, info, self._hosted, self._processing.losses)
        else:
            batch = to_batch(loaded, info, self._hosted, augmentation, seed=self._seed, epoch=epoch)
        self._check(batch)
        return batch

    def announce(self, indices: Tensor) -> None:
        """Prefetch a batch; an earlier prefetch that was never used is dropped."""
        wanted = tuple(indices.tolist())
        if self._prefetched is not None:
            self._prefetched[1].cancel()
        self._prefetched = (wanted, self._executor.submit(self._load, wanted))

    def labels(self, target: str) -> Collection[int] | None:
        """Return the distinct values of a target; of very many only the smallest and the largest."""
        result = self._target(target)
        if result is None or result.low is None or result.high is None:
            return None
        return result.labels if result.labels is not None else (result.low, result.high)

    def close(self) -> None:
        """Stop the thread and close the files."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._reader.close()

    def _load(self, wanted: tuple[int, ...]) -> _Loaded:
        """Read samples, and process texts and sound."""
        loaded = self._kept.get(wanted) or self._read(wanted)
        if not isinstance(loaded.inputs, tuple):
            return loaded, None
        assert self._processing is not None  # a server's fits have it
        given, payloads = _unprocessed(loaded.inputs, self._processing.options)
        try:
            return loaded, (given, self._processing.process(self._hosted, given, payloads))
        except ServiceError as error:
            if error.reason is ErrorReason.CANCELLED:  # the server is stopping: the samples are not at fault
                raise
            raise _unusable(error, wanted) from error

    def _read(self, wanted: tuple[int, ...]) -> LoadedSamples:
        """Read samples, and keep them while there is room."""
        loaded = self._reader.load(wanted)
        size = loaded.byte_count
        if size <= self._free_bytes:
            self._free_bytes -= size
            self._kept[wanted] = loaded
        return loaded

    def _loaded(self, wanted: tuple[int, ...]) -> _Loaded:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[0] == wanted:
            return prefetched[1].result()
        return self._load(wanted)

    def _target(self, name: str) -> TargetSignature | None:
        signature = self._reader.info.signature
        if signature is None:
            return None
        if not name and len(signature.targets) == 1:
            return next(iter(signature.targets.values()))
        return signature.targets.get(name)


class SamplePart:
    """Some samples of a data set, as a data set.

    Args:
        samples: The data set; not closed with this object.
        indices: Which samples, int64 (count,).
    """

    def __init__(self, samples: DatasetSamples, indices: Tensor) -> None:
        self._samples, self._indices = samples, indices

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, as augmentations receive it; () for texts."""
        return self._samples.input_shape

    @property
    def categories(self) -> tuple[str, ...]:
        """Names of the classes by label; empty when unknown."""
        return self._samples.categories

    def __len__(self) -> int:
        return len(self._indices)

    def batch(self, indices: Tensor, augmentation: Augmentation | None = None, epoch: int = 0) -> Batch:
        """Return samples as `DatasetSamples.batch`."""
        return self._samples.batch(self._indices[indices], augmentation, epoch)

    def announce(self, indices: Tensor) -> None:
        """Prefetch a batch."""
        self._samples.announce(self._indices[indices])

    def labels(self, target: str) -> Collection[int] | None:
        """Return the distinct values of a target in the whole data set."""
        return self._samples.labels(target)


def _unprocessed(
    inputs: tuple[TextEntry, ...] | Clips, options: TextOptions
) -> tuple[ProcessorInput, list[Payload]]:
    """Return samples as a call's inputs, with their payloads."""
    if not isinstance(inputs, Clips):
        return TextInput("", inputs, options), []
    clips = tuple(AudioSpec(len(clip)) for clip in inputs)
    return AudioInput("", clips, 0), [np.frombuffer(clip, np.uint8) for clip in inputs]


def _unusable(error: ServiceError, indices: tuple[int, ...]) -> ServiceError:
    """Name the sample of the data set in an error about one text or clip of a batch."""
    if error.reason is ErrorReason.REQUEST_TOO_LARGE:
        return ServiceError(error.reason, f"{error.message}: use a smaller batch_size", **error.details)
    position = error.details.get("sample", "")
    if not position.isdecimal() or int(position) >= len(indices):
        return error
    index = indices[int(position)]
    details = {**error.details, "sample": str(index)}
    cure = "; a fit cuts them with `truncate`" if "token_count" in details else ""
    problem = f"sample {index} of the data set cannot be used: {error.message}{cure}"
    return ServiceError(error.reason, problem, **details)
