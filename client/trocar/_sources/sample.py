"""Samples of a source."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_SAMPLE_BYTES = 256 << 20
"""The most bytes of one encoded sample, in a file or in an archive: a size in a header may be a lie."""


@dataclass(frozen=True)
class Sample:
    """Sample of a source; not read yet."""

    key: str
    """Names it, the same in every run: a relative path, the key in an archive, an index."""
    load: Callable[[], object]
    """Returns encoded bytes, a PIL image or an array; called once, on any thread."""
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
