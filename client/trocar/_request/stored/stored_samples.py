"""Stored samples: a part of a data set on the server, as a batch of a stream."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StoredSamples:
    """Consecutive samples of a stored data set."""

    dataset_id: str
    first: int
    """The first sample, from 0."""
    count: int
    """How many samples, at least 1."""
