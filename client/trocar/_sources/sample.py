"""Samples of a source."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trocar._base.tensors import Array

MAX_SAMPLE_BYTES = 256 << 20
"""The most bytes of one encoded sample, in a file or in an archive: a size in a header may be a lie."""


@dataclass(frozen=True)
class TextSample:
    """A text of a source."""

    value: object
    """A string, two of a pair, token ids, or words."""


@dataclass(frozen=True)
class SoundSample:
    """A clip of sound of a source."""

    data: bytes | Array
    """A WAV or FLAC file; or samples of one channel, floating-point."""
    rate: int = 0
    """Samples per second; 0 for a file, which says it."""


@dataclass(frozen=True)
class Sample:
    """Sample of a source; not read yet."""

    key: str
    """Names it, the same in every run: a relative path, the key in an archive, an index."""
    load: Callable[[], object]
    """Returns encoded bytes, a PIL image, an array, a text or a clip of sound; called once, on any thread."""
    fraction: float | None = None
    """Which part of the source ends with this sample, 0 to 1; None when the source has no known end."""


@dataclass(frozen=True)
class Source:
    """Samples in a fixed order."""

    description: Mapping[str, Any]
    """Kind, name and fingerprint, as JSON: a run goes on only where they are the same."""
    samples: Callable[[int], Iterator[Sample]]
    """Yields the samples from this index on."""
    count: int | None = None
    """How many samples there are; None when only reading tells."""
    notes: tuple[str, ...] = ()
    """What a person should know, for example files that were left out."""
