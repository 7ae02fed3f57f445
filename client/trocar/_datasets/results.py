"""Batches sent one after another, and what came of each."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trocar._datasets import batches as cutting
from trocar._datasets.batches import Batch
from trocar.errors import (
    InputError,
    PassTooLargeError,
    ReplyTooLargeError,
    RequestTooLargeError,
    SourceError,
    TrocarError,
)

if TYPE_CHECKING:
    from trocar._client import Client
    from trocar._client_stream import ExtractStream
    from trocar._edits import Edit
    from trocar._execution import Numerics
    from trocar._feature_maps import FeatureMaps
    from trocar._taps import Tap

FAULTS_OF_DATA = (InputError, RequestTooLargeError, ReplyTooLargeError, PassTooLargeError)
"""What a batch may fail of because of its samples; all else would fail every batch, or is the server's."""


@dataclass(frozen=True)
class Result:
    """What came of one batch that was sent."""

    maps: "FeatureMaps | None"
    error: Exception | None = None
    """Why this batch alone failed."""


@dataclass(frozen=True)
class Outcome:
    """A batch with what came of it; no maps where it failed, or where no sample of it could be sent."""

    batch: Batch
    maps: "FeatureMaps | None"
    error: Exception | None


def outcomes(
    client: "Client",
    model_id: str,
    batches: Iterable[Batch],
    taps: "Sequence[str | Tap]",
    *,
    edits: "Sequence[str | Edit]" = (),
    timeout_s: float | None = None,
    numerics: "Numerics | None" = None,
    at_end: "Callable[[ExtractStream], None] | None" = None,
) -> Generator[Outcome]:
    """Send the readable samples of each batch; yield every batch in order, sent or not.

    Args:
        client: Who asks.
        model_id: The model.
        batches: What to send.
        taps: What to collect.
        edits: What is changed in every pass.
        timeout_s: How long one batch may take, in seconds; the client's timeout when None.
        numerics: The loosest numbers that will do; the model's default when None.
        at_end: Called with the stream after its last result; the statistics are then over all of it.

    Raises:
        TrocarError: A call failed for a reason that is not its data's.
        Exception: What taking the batches raised, after the results of those before.
    """
    under_way: deque[_UnderWay] = deque()
    failures: list[BaseException] = []
    inputs = _inputs(batches, under_way, failures)
    options = {"edits": edits, "numerics": numerics, "timeout_s": timeout_s}
    results = _results(client, model_id, inputs, taps, options, at_end)
    for result in _named(results, under_way):
        while not (entry := under_way.popleft()).is_sent:
            yield Outcome(entry.batch, None, entry.error)
        yield Outcome(entry.batch, result.maps, result.error)
    for entry in under_way:
        yield Outcome(entry.batch, None, entry.error)
    if failures:
        raise failures[0]


@dataclass(frozen=True)
class _UnderWay:
    """A batch that was taken and has no outcome yet."""

    batch: Batch
    is_sent: bool
    error: SourceError | None = None


def _inputs(
    batches: Iterable[Batch], under_way: "deque[_UnderWay]", failures: list[BaseException]
) -> Iterator[Any]:
    """Yield what to send and note it; on another thread, perhaps, so that nothing is raised here."""
    try:
        for batch in batches:
            try:
                inputs = cutting.inputs(batch.readable) if batch.readable else None
            except SourceError as error:
                under_way.append(_UnderWay(batch, False, error))
                continue
            under_way.append(_UnderWay(batch, inputs is not None))
            if inputs is not None:
                yield inputs
    except Exception as error:  # noqa: BLE001 - raised by `outcomes`, on its thread
        failures.append(error)


def _named(results: Iterator[Result], under_way: "deque[_UnderWay]") -> Iterator[Result]:
    """Let an error that ends everything say at which batch."""
    while True:
        try:
            result = next(results)
        except StopIteration:
            return
        except TrocarError as error:
            if names := [entry.batch.name for entry in under_way if entry.is_sent]:
                error.add_note(f"while extracting {names[0]}")
            raise
        yield result


def _results(
    client: "Client",
    model_id: str,
    inputs: Iterable[Any],
    taps: "Sequence[str | Tap]",
    options: dict[str, Any],
    at_end: "Callable[[ExtractStream], None] | None",
) -> Iterator[Result]:
    """Yield what comes of each batch, in order."""
    is_running = at_end is not None
    with client.extract_stream(model_id, inputs, taps, running_statistics=is_running, **options) as stream:
        for result in stream:
            yield Result(result.maps, result.error)
        if at_end is not None:
            at_end(stream)
