"""Pool of Ray actors that read samples and send them to the server, in the batches and order of one machine.

    with RayPool(client, model_id, taps, options, source, workers=4) as pool:
        for outcome in pool.outcomes(opened, start=0, limit=None): ...

Each actor opens the source itself and has its own connection: samples go from shared storage to a replica
without passing through Ray. Only feature maps do, as many as `CHUNKS_AHEAD` chunks of each actor hold.
"""

import os
import socket
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from trocar._export.decoding import client_decoder, keep_encoded
from trocar._export.memory_source import memory_source
from trocar._export.options import Options
from trocar._export.results import Outcome, outcomes_of_samples
from trocar._sources.sample import Source
from trocar._sources.source_opening import open_source
from trocar._sync.client import Client
from trocar.errors import SourceError, TrocarError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from trocar._request.taps import Tap
    from trocar._transport.channel import ConnectOptions

CHUNK_BATCHES = 4
"""Batches of one task of an actor."""
CHUNKS_AHEAD = 2
"""Tasks of each actor that are begun before their results are wanted."""


@dataclass(frozen=True)
class Work:
    """What all actors do.

    Attributes:
        connection: To the server.
        model_id: The model.
        taps: Values to collect.
        options: Of the run.
        given: The source as the user named it.
        folder: The working directory, to which paths are relative.
        sample_rank: Dimensions of one sample of the model's input.
        max_pixels: Of an image that is decoded here.
    """

    connection: "ConnectOptions"
    model_id: str
    taps: "list[str | Tap]"
    options: Options
    given: object
    folder: str
    sample_rank: int
    max_pixels: int


@dataclass(frozen=True)
class Chunk:
    """Result of a task: outcomes in order, and the error that ended it."""

    outcomes: list[Outcome]
    error: TrocarError | None = None

    @property
    def sample_count(self) -> int:
        """Samples of all batches."""
        return sum(len(outcome.batch.samples) for outcome in self.outcomes)


class Reader:
    """An actor: reads samples, sends them, returns the results.

    Args:
        work: What to do.
        description: The source's, as the caller opened it.
    """

    def __init__(self, work: Work, description: Mapping[str, Any]) -> None:
        with suppress(OSError):  # paths may be absolute
            os.chdir(work.folder)
        options = work.options
        self._work = work
        self._problem: SourceError | None = None
        try:  # an actor whose constructor fails tells of nothing but its death
            self._source = memory_source(work.given) or open_source(
                work.given, decode=options.decode, sample_rank=work.sample_rank, column=options.column
            )
        except TrocarError as error:
            node = socket.gethostname()
            self._problem = SourceError(f"the source cannot be read on node {node!r}: {error}")
        else:
            if self._source.description != description:
                other = "the source has other content on another node; use shared storage"
                self._problem = SourceError(other)
        self._decoder = client_decoder(work.max_pixels) if options.decode == "client" else keep_encoded
        self._client = Client(work.connection)

    def chunk(self, start: int, count: int) -> Chunk:
        """Extract samples; a failed call is part of the result, behind the results before it."""
        if self._problem is not None:
            return Chunk([], self._problem)
        work, result = self._work, list[Outcome]()
        numbered = islice(enumerate(self._source.samples(start), start), count)
        try:
            for outcome in outcomes_of_samples(
                self._client, work.model_id, numbered, work.taps, work.options, self._decoder
            ):
                result.append(_light(outcome))
        except TrocarError as error:
            return Chunk(result, error)
        return Chunk(result)


class RayPool:
    """The actors of one run.

    Args:
        work: What they do.
        workers: How many.
    """

    def __init__(self, work: Work, workers: int) -> None:
        self._work, self._workers = work, workers
        self._actors: list[Any] = []

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: "TracebackType | None"
    ) -> None:
        self._actors.clear()  # without a handle they end, after the tasks that run

    def outcomes(self, source: Source, start: int, limit: int | None) -> Generator[Outcome]:
        """Yield every batch from a sample on, in order, with its result.

        Args:
            source: As the caller opened it.
            start: The first sample; a batch begins there.
            limit: Where to stop: the number of samples of the whole run; at the end when None.

        Raises:
            TrocarError: A call failed for a reason that is not its data's.
        """
        import ray

        actor_type: Any = ray.remote(Reader)
        # They wait for disks and replies most of the time; with CPUs of their own they might wait for
        # those of the replicas, for ever.
        options = actor_type.options(
            num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD"
        )
        self._actors = [options.remote(self._work, source.description) for _ in range(self._workers)]
        size = CHUNK_BATCHES * self._work.options.batch
        known = [count for count in (source.count, limit) if count is not None]
        end = min(known) if known else None
        tasks: deque[tuple[int, Any]] = deque()
        following, turn = start, 0
        while True:
            while len(tasks) < CHUNKS_AHEAD * self._workers and (end is None or following < end):
                count = size if end is None else min(size, end - following)
                actor = self._actors[turn % self._workers]
                tasks.append((count, actor.chunk.remote(following, count)))
                following, turn = following + count, turn + 1
            if not tasks:
                return
            count, task = tasks.popleft()
            chunk: Chunk = ray.get(task)
            del task
            is_last = chunk.sample_count < count
            is_aligned = is_last or len(chunk.outcomes) * self._work.options.batch <= count + self._short(
                count
            )
            # A change of kind ends a batch early, and the end of a chunk may be within one: from there again.
            yielded = chunk.outcomes if is_aligned or chunk.error else chunk.outcomes[:-1]
            for outcome in yielded:
                start += len(outcome.batch.samples)
                yield outcome
            if chunk.error is not None:
                raise chunk.error
            if is_last:
                return
            if not is_aligned:
                tasks.clear()
                following = start

    def _short(self, count: int) -> int:
        """Samples that the last batch of a chunk lacks: with a limit."""
        return -count % self._work.options.batch


def _light(outcome: Outcome) -> Outcome:
    """Leave out the values of samples whose result is there: nobody sends them again."""
    if outcome.maps is None:
        return outcome
    samples = [
        replace(sample, value=None) if sample.error is None else sample for sample in outcome.batch.samples
    ]
    return replace(outcome, batch=replace(outcome.batch, samples=samples))
