"""Upload plan: the shards to upload, and progress."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trocar._uploads.shards import Shard

Report = Callable[[int], None]
"""Takes how many samples have been read."""


@dataclass(frozen=True)
class UploadPlan:
    """A source split into shards."""

    name: str
    """What the data set is called."""
    categories: tuple[str, ...]
    """Names of the classes by label; empty when unknown."""
    sample_count: int
    """How many samples there are."""
    shards: Callable[[], Iterator[Shard]]
    """Yields the shards in order; reads every sample."""


@dataclass(frozen=True)
class UploadProgress:
    """Progress of an upload."""

    read_count: int
    """Samples that have been read; all are, before the first byte is sent."""
    sample_count: int
    """Samples altogether."""
    sent_bytes: int = 0
    """Bytes that the server has stored by now, of those that it did not have."""
    missing_bytes: int = 0
    """Bytes that it did not have; 0 until that is known."""
    byte_count: int = 0
    """Bytes of all shards; 0 until that is known."""
