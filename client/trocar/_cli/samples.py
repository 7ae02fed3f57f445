"""From files on the command line to batches of inputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from trocar._cli.failures import refuse
from trocar._tensors import Array

ARRAY_SUFFIX = ".npy"


@dataclass(frozen=True)
class Sample:
    """One row of a batch."""

    name: str
    """Where it comes from: `cat.jpg`, or `cats.npy[3]` for a row of a batch."""
    value: Path | Array
    """An encoded image, or an array that is still on disk."""

    @property
    def is_image(self) -> bool:
        """Whether the server preprocesses it; images and arrays do not go into one batch."""
        return isinstance(self.value, Path) or _is_pixels(self.value)


def read_samples(paths: Sequence[Path], sample_rank: int) -> list[Sample]:
    """List the samples in files, in order; nothing but headers is read.

    A `.npy` file holds uint8 pixels, (height, width, 3) or (batch, height, width, 3), for the server to
    preprocess; or the model's input, one sample or with the batch dimension first.

    Args:
        paths: Files that exist.
        sample_rank: How many dimensions one sample of the model's input has; for arrays only.

    Raises:
        typer.BadParameter: A `.npy` file that is none, or of another rank.
    """
    return [sample for path in paths for sample in _read(path, sample_rank)]


def batches(samples: Sequence[Sample], size: int) -> Iterator[list[Sample]]:
    """Cut samples into batches of at most `size`, in order; images and arrays apart."""
    for _, group in groupby(samples, key=lambda sample: sample.is_image):
        alike = list(group)
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


def _read(path: Path, sample_rank: int) -> list[Sample]:
    if path.suffix != ARRAY_SUFFIX:
        return [Sample(str(path), path)]
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        refuse(f"{path} is no .npy file that can be read: {error}")
    rank = 3 if _is_pixels(array, ranks=(3, 4)) else sample_rank
    if array.ndim not in (rank, rank + 1):
        refuse(f"{path} has shape {array.shape}; one sample has {rank} dimensions, a batch {rank + 1}")
    if array.ndim == rank:
        return [Sample(str(path), array)]
    return [Sample(f"{path}[{index}]", row) for index, row in enumerate(array)]


def _is_pixels(array: Array, ranks: tuple[int, ...] = (3,)) -> bool:
    return array.dtype == np.uint8 and array.ndim in ranks and array.shape[-1] == 3
