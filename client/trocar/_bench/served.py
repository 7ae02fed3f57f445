"""Served calls: `Client.extract`, as a load."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from trocar._bench.records import Answer
from trocar._bench.worker import Call, CallFailedError
from trocar._result.feature_maps import FeatureMaps
from trocar._sync.client import Client
from trocar._transport.channel import ConnectOptions
from trocar.errors import TrocarError

_MOST_IMAGES = 512
"""Images that a client holds in memory, to read none while it measures."""


@dataclass(frozen=True)
class Served:
    """One request, repeated; each client has its own random inputs."""

    options: ConnectOptions
    """Where the server is."""
    model_id: str
    """The model."""
    taps: tuple[str, ...]
    """What is collected."""
    batch: int
    """Samples of one call."""
    input_shape: tuple[int, ...]
    """One random sample, without the batch."""
    images: tuple[Path, ...] = ()
    """Encoded images to send instead of random numbers, in turn; the server preprocesses them."""
    call_options: tuple[tuple[str, Any], ...] = ()
    """Further options of `extract`."""
    seed: int = 0
    """Of the random inputs."""

    @contextmanager
    def open(self, client: int) -> Iterator[Call]:
        """Connect, make the inputs, and yield the call."""
        batches = cycle(self.batches(client))
        with Client(self.options) as connected:

            def call() -> Answer:
                try:
                    return answer_of(self.extract(connected, next(batches)))
                except TrocarError as error:
                    raise CallFailedError(str(error.reason or type(error).__name__)) from error

            yield call

    def extract(self, client: Client, batch: Any) -> FeatureMaps:
        """Make the request once.

        Raises:
            TrocarError: What `Client.extract` raises.
        """
        return client.extract(self.model_id, batch, list(self.taps), **dict(self.call_options))

    def batches(self, client: int) -> list[Any]:
        """Return the batches that a client sends in turn."""
        if not self.images:
            random = np.random.default_rng((self.seed, client))
            return [random.standard_normal((self.batch, *self.input_shape), np.float32)]
        start = client * self.batch % len(self.images)
        encoded = [path.read_bytes() for path in (*self.images[start:], *self.images[:start])[:_MOST_IMAGES]]
        turn = cycle(encoded)
        return [list(islice(turn, self.batch)) for _ in range(max(len(encoded) // self.batch, 1))]


def answer_of(maps: FeatureMaps) -> Answer:
    """Return a reply's metadata."""
    how, timing = maps.execution, maps.timing
    return Answer(timing.queue_s, timing.compute_s, how.numerics, how.engine, how.is_cached, how.row_count)
