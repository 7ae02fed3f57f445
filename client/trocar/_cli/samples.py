"""From files on the command line to samples, for the commands that keep all names in memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from trocar._cli.failures import refuse
from trocar._datasets.sources.arrays import ARRAY_SUFFIX, as_batch, is_pixels, open_npy
from trocar._tensors import Array
from trocar.errors import SourceError


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
        return isinstance(self.value, Path) or is_pixels(self.value)


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


def is_one_batch(samples: Sequence[Sample], size: int) -> bool:
    """Tell whether one call takes all samples."""
    return len(samples) <= size and len({sample.is_image for sample in samples}) == 1


def _read(path: Path, sample_rank: int) -> list[Sample]:
    if path.suffix != ARRAY_SUFFIX:
        return [Sample(str(path), path)]
    try:
        array = open_npy(path)
        rows = as_batch(array, sample_rank, str(path))
    except SourceError as error:
        refuse(str(error))
    if rows.ndim > np.ndim(array):
        return [Sample(str(path), array)]
    return [Sample(f"{path}[{index}]", row) for index, row in enumerate(rows)]
