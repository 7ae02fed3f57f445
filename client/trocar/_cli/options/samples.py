"""Samples from files on the command line, for commands that keep all names in memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from trocar._base.input_kinds import is_pattern, is_pixels, is_url, matching_paths
from trocar._base.tensors import Array
from trocar._cli.failures import refuse
from trocar._sources.arrays import ARRAY_SUFFIX, as_batch, open_npy
from trocar.errors import SourceError


@dataclass(frozen=True)
class InputSample:
    """One row of a batch."""

    name: str
    """Where it comes from: `cat.jpg`, or `cats.npy[3]` for a row of a batch."""
    value: Path | Array
    """An encoded image, or an array that is still on disk."""

    @property
    def is_image(self) -> bool:
        """Whether the server preprocesses it; a batch does not mix images and arrays."""
        return isinstance(self.value, Path) or is_pixels(self.value)


def expand(source: str | Path) -> list[Path]:
    """Return the path itself, or what matches a pattern that the shell did not expand, sorted.

    Raises:
        typer.BadParameter: It is a URL, or there is no such file or folder.
    """
    text = str(source)
    if is_url(text):
        refuse(f"{text}: nothing is downloaded for you; download it first: curl -LO {text}")
    if is_pattern(text):
        try:
            return matching_paths(text)
        except FileNotFoundError as error:
            refuse(f"{text}: {error.strerror}")
    if not Path(text).exists():
        refuse(f"{text}: no such file or folder")
    return [Path(text)]


def read_samples(paths: Sequence[Path], sample_rank: int) -> list[InputSample]:
    """List the samples in files, in order; only headers are read.

    A `.npy` file holds uint8 pixels, (height, width, 3) or (batch, height, width, 3), for the server to
    preprocess; or the model's input, one sample or with the batch dimension first.

    Args:
        paths: Files that exist.
        sample_rank: How many dimensions one sample of the model's input has; for arrays only.

    Raises:
        typer.BadParameter: A `.npy` file that is none, or of another rank.
    """
    return [sample for path in paths for sample in _read(path, sample_rank)]


def batches(samples: Sequence[InputSample], size: int) -> Iterator[list[InputSample]]:
    """Split samples into batches of at most `size`, in order; images and arrays separately."""
    for _, group in groupby(samples, key=lambda sample: sample.is_image):
        alike = list(group)
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


def is_one_batch(samples: Sequence[InputSample], size: int) -> bool:
    """Whether one call takes all samples."""
    return len(samples) <= size and len({sample.is_image for sample in samples}) == 1


def _read(path: Path, sample_rank: int) -> list[InputSample]:
    if path.suffix.lower() != ARRAY_SUFFIX:
        return [InputSample(str(path), path)]
    try:
        array = open_npy(path)
        rows = as_batch(array, sample_rank, str(path))
    except SourceError as error:
        refuse(str(error))
    if rows.ndim > np.ndim(array):
        return [InputSample(str(path), array)]
    return [InputSample(f"{path}[{index}]", row) for index, row in enumerate(rows)]
