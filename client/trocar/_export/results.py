"""Batch results: batches sent one after another, and the result or failure of each."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trocar._base.call_options import AS_CONNECTED, CallOptions
from trocar._export import sample_batches as cutting
from trocar._export.decoding import Decoder, Loaded, load
from trocar._export.options import Options
from trocar._export.prefetch import BATCHES_AHEAD, ReadAhead
from trocar._export.ragged import kinds_of
from trocar._export.sample_batches import Batch
from trocar._request.inputs import NO_FLAGS, with_flags
from trocar._sources.sample import Sample
from trocar.errors import (
    InputError,
    PassTooLargeError,
    PassTooLongError,
    ReplyTooLargeError,
    RequestTooLargeError,
    SourceError,
    TrocarError,
)

if TYPE_CHECKING:
    from trocar._request.edits import Edit
    from trocar._request.taps import Tap
    from trocar._result.feature_maps import FeatureMaps
    from trocar._sync.client import Client
    from trocar._sync.stream import ExtractStream

FAULTS_OF_DATA = (InputError, RequestTooLargeError, ReplyTooLargeError, PassTooLargeError, PassTooLongError)
"""What a batch may fail of because of its samples; all else would fail every batch, or is the server's."""


@dataclass(frozen=True)
class BatchReply:
    """Result of one batch that was sent."""

    maps: "FeatureMaps | None"
    error: Exception | None = None
    """Why this batch alone failed."""


@dataclass(frozen=True)
class Outcome:
    """A batch with its result; no maps if it failed, or if none of its samples could be sent."""

    batch: Batch
    maps: "FeatureMaps | None"
    error: Exception | None


def outcomes(  # noqa: PLR0913 - the options of a pass
    client: "Client",
    model_id: str,
    batches: Iterable[Batch],
    taps: "Sequence[str | Tap]",
    *,
    edits: "Sequence[str | Edit]" = (),
    how: CallOptions = AS_CONNECTED,
    adapter: str = "",
    flags: Mapping[str, bool | int | str] = NO_FLAGS,
    at_end: "Callable[[ExtractStream], None] | None" = None,
) -> Generator[Outcome]:
    """Send the readable samples of each batch; yield every batch in order, sent or not.

    Args:
        client: The client.
        model_id: The model.
        batches: Batches to send.
        taps: Values to collect.
        edits: Edits of every pass.
        how: Options of the calls.
        adapter: The caller's LoRA adapter that every pass runs with.
        flags: Flags of the forward, by name.
        at_end: Called with the stream after its last result; the statistics are then over all of it.

    Raises:
        TrocarError: A call failed for a reason that is not its data's.
        Exception: An exception of `batches`, after the results of the batches before.
    """
    under_way: deque[_UnderWay] = deque()
    failures: list[BaseException] = []
    inputs = (with_flags(each, flags) for each in _inputs(batches, under_way, failures))
    options = {"edits": edits, "options": how, "adapter": adapter}
    results = _results(client, model_id, inputs, taps, options, at_end)
    for result in _named(results, under_way):
        while not (entry := under_way.popleft()).is_sent:
            yield Outcome(entry.batch, None, entry.error)
        yield Outcome(entry.batch, result.maps, result.error)
    for entry in under_way:
        yield Outcome(entry.batch, None, entry.error)
    if failures:
        raise failures[0]


def outcomes_of_samples(
    client: "Client",
    model_id: str,
    numbered: Iterable[tuple[int, Sample]],
    taps: "Sequence[str | Tap]",
    options: Options,
    decoder: Decoder,
) -> Generator[Outcome]:
    """Read samples ahead, and yield their batches as `outcomes` does.

    Args:
        client: The client.
        model_id: The model.
        numbered: The samples with their places in the source.
        taps: Values to collect.
        options: Those of the run.
        decoder: Decodes images.

    Raises:
        TrocarError: As `outcomes`.
    """

    def read(item: tuple[int, Sample]) -> Loaded:
        return load(*item, decoder, options.max_tokens, truncate=options.truncate)

    with ReadAhead(numbered, read, depth=BATCHES_AHEAD * options.batch) as loaded:
        yield from outcomes(
            client,
            model_id,
            cutting.cut(loaded, options.batch, kinds_of(client, model_id)),
            taps,
            edits=options.edits,
            how=CallOptions(numerics=options.numerics, timeout_s=options.timeout_s),
            adapter=options.adapter,
            flags=options.flags,
        )


@dataclass(frozen=True)
class _UnderWay:
    """A batch in flight, without an outcome yet."""

    batch: Batch
    is_sent: bool
    error: SourceError | None = None


def _inputs(
    batches: Iterable[Batch], under_way: "deque[_UnderWay]", failures: list[BaseException]
) -> Iterator[Any]:
    """Yield inputs to send and record them; possibly on another thread, so that nothing is raised here."""
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


def _named(results: Iterator[BatchReply], under_way: "deque[_UnderWay]") -> Iterator[BatchReply]:
    """Add a note with the batch to an error that ends the run."""
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
) -> Iterator[BatchReply]:
    """Yield the result of each batch, in order."""
    is_running = at_end is not None
    with client.extract_stream(model_id, inputs, taps, running_statistics=is_running, **options) as stream:
        for result in stream:
            yield BatchReply(result.maps, result.error)
        if at_end is not None:
            at_end(stream)
