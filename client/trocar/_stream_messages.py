"""The messages of a stream as bytes: what goes out for a batch, and results from what comes back."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from trocar._feature_maps import FeatureMaps
from trocar._inputs import wire_inputs
from trocar._replies import ReplyAssembler
from trocar._requests import FROM_INPUT, ExtractCall, Start, Taps, tap_payloads, wire_taps
from trocar._rpc_errors import error_from_batch
from trocar.errors import BadReplyError, TrocarError
from trocar_api.v1 import stream_pb2 as pb
from trocar_api.wire import Chunk, WireError, split_message


@dataclass(frozen=True)
class BatchResult:
    """What became of one batch of a stream: feature maps, or why it failed alone."""

    index: int
    """The batch's position, from 0 (or from `first_batch`)."""
    maps: FeatureMaps | None = field(repr=False)
    """Its feature maps, when it was computed."""
    error: Exception | None = None
    """Why it failed: a `TrocarError`, or what was wrong with the inputs before they were sent."""

    def unwrap(self) -> FeatureMaps:
        """Return the feature maps.

        Raises:
            Exception: The batch failed.
        """
        if self.error is not None:
            raise self.error
        assert self.maps is not None  # one of the two is always there
        return self.maps


@dataclass(frozen=True)
class StreamOptions:
    """What a stream does with every batch, and how far it may run ahead."""

    model_id: str
    """The id of a loaded model."""
    taps: Taps
    """What to collect."""
    first_batch: int
    """The index of the first batch."""
    batch_timeout_s: float
    """How long one batch may wait and compute, in seconds."""
    window: int
    """Batches that may be sent and not yet answered."""
    retries: int
    """How often a broken connection is made again without an answer in between."""
    chunk_bytes: int | None = None
    """The most payload bytes in one message of the replies."""
    start: Start = FROM_INPUT
    """Where every pass starts."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window} leaves no room for a batch")
        if self.first_batch < 0:
            raise ValueError(f"first_batch={self.first_batch} is negative")


def start_call(options: StreamOptions, first_batch: int) -> ExtractCall:
    """Build the messages that begin a connection."""
    start = pb.ExtractStreamStart(
        model_id=options.model_id,
        taps=wire_taps(options.taps),
        max_chunk_bytes=options.chunk_bytes,
        first_batch_index=first_batch,
        batch_timeout_s=options.batch_timeout_s,
        start_at=options.start.at or "",
        start_inputs=options.start.inputs(),
    )
    head = pb.ExtractStreamRequest(start=start).SerializeToString()
    return ExtractCall(head, tap_payloads(options.taps))


def batch_call(index: int, inputs: object) -> ExtractCall:
    """Build the messages of one batch; without inputs (None) the server answers with an error."""
    arguments, payloads = wire_inputs(inputs)
    head = pb.ExtractStreamRequest(batch=pb.StreamBatch(batch_index=index, inputs=arguments))
    return ExtractCall(head.SerializeToString(), payloads)


def unsendable(result: BatchResult, error: Exception | None) -> BatchResult:
    """Return the result with the error for which the batch was never sent, if there is one."""
    return result if error is None else BatchResult(result.index, None, error)


class StreamAssembler:
    """Puts the results of a stream together from its messages.

    Args:
        model_id: The model that was asked.
        first_index: The index of the first batch that was sent.
    """

    def __init__(self, model_id: str, first_index: int) -> None:
        self._model_id = model_id
        self._next_index = first_index
        self._reply: ReplyAssembler | None = None
        self.end: pb.StreamEnd | None = None

    def feed(self, message: bytes) -> Iterator[BatchResult]:
        """Take the next message and yield the result that it completes, if it does.

        Raises:
            BadReplyError: The message breaks the contract.
        """
        try:
            head, chunks = split_message(message)
            part = pb.ExtractStreamResponse.FromString(head)
        except (WireError, DecodeError) as error:
            raise BadReplyError(f"a message of the stream cannot be decoded: {error}") from error
        if self.end is not None:
            raise BadReplyError("the stream goes on after its end")
        if part.HasField("result"):
            yield from self._begin(part.result)
        elif part.HasField("end"):
            if self._reply is not None:
                raise BadReplyError("the stream ends within a batch")
            self.end = part.end
        yield from self._place(chunks)

    def _begin(self, result: pb.BatchResult) -> Iterator[BatchResult]:
        if self._reply is not None or result.batch_index != self._next_index:
            raise BadReplyError(f"batch {self._next_index} was due, batch {result.batch_index} came")
        if result.HasField("error"):
            yield self._result(None, error_from_batch(result.error))
            return
        self._reply = ReplyAssembler(self._model_id)
        self._reply.begin(result.reply)

    def _place(self, chunks: list[Chunk]) -> Iterator[BatchResult]:
        if chunks and self._reply is None:
            raise BadReplyError("the stream has bytes that belong to no batch")
        if self._reply is None:
            return
        for chunk in chunks:
            self._reply.place(chunk)
        if self._reply.is_complete:
            maps = self._reply.finish()
            self._reply = None
            yield self._result(maps, None)

    def _result(self, maps: FeatureMaps | None, error: TrocarError | None) -> BatchResult:
        index = self._next_index
        self._next_index += 1
        return BatchResult(index, maps, error)
