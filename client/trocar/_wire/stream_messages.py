"""Stream messages as bytes: one serialised per batch, results parsed from replies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from google.protobuf.message import DecodeError

from trocar._base.call_options import Wire
from trocar._request.execution import AS_USUAL, Execution
from trocar._request.inputs import wire_inputs
from trocar._request.narrow import check_wire
from trocar._request.stored.stored_samples import StoredSamples
from trocar._request.surgery import NO_SURGERY, Surgery
from trocar._result.feature_maps import FeatureMaps
from trocar._transport.rpc_errors import error_from_batch
from trocar._wire.replies import ReplyAssembler
from trocar._wire.requests import FROM_INPUT, ExtractCall, Start, Taps, tap_payloads, wire_taps
from trocar.errors import BadReplyError
from trocar_api.byte_sizes import byte_count
from trocar_api.v1 import stream_pb2 as pb
from trocar_api.v1.direction_pb2 import Direction, DirectionFit
from trocar_api.v1.extraction_pb2 import ExtractResponse
from trocar_api.wire import WireError, split_message

MAX_CHECKPOINT_INTERVAL = 1024


def check_batches(batches: object) -> None:
    """Refuse batches that cannot be iterated over.

    Raises:
        TypeError: It is not an iterable.
    """
    if not (hasattr(batches, "__iter__") or hasattr(batches, "__aiter__")):
        raise TypeError(f"batches is {batches!r:.60}; give an iterable of inputs, such as a list of arrays")


@dataclass(frozen=True)
class BatchResult:
    """Result of one batch of a stream: feature maps, or the reason why it failed alone."""

    index: int
    """The batch's position, from 0 (or from `first_batch`)."""
    maps: FeatureMaps | None = field(repr=False)
    """Its feature maps, when it was computed."""
    error: Exception | None = None
    """Why it failed: a `TrocarError`, or what was wrong with the inputs before they were sent."""
    checkpoint: bytes | None = field(default=None, repr=False)
    """The running statistics after this batch, now and then, for `extract_stream(checkpoint=...)`."""

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
    """Options of a stream: of every batch, and the window of batches in flight."""

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
    chunk_bytes: int | str | None = None
    """The most payload bytes in one message of the replies."""
    start: Start = FROM_INPUT
    """Where every pass starts."""
    has_running_statistics: bool = False
    """Whether statistics are taken over the whole stream."""
    checkpoint: bytes | None = None
    """Where running statistics go on from."""
    checkpoint_interval: int = 16
    """The batches between two checkpoints."""
    surgery: Surgery = NO_SURGERY
    """What is changed in every pass, and what gradients are taken of."""
    execution: Execution = AS_USUAL
    """How the passes may be run."""
    wire: Wire | None = None
    """What float32 values travel as."""
    adapter: str = ""
    """The caller's LoRA adapter that every pass runs with."""
    direction_fit: DirectionFit | None = None
    """The directions that are fitted to the values, which are then not sent."""

    def __post_init__(self) -> None:
        check_wire(self.wire)
        if self.window < 1:
            raise ValueError(f"window={self.window} is too small for a batch")
        if self.first_batch < 0:
            raise ValueError(f"first_batch={self.first_batch} is negative")
        if self.checkpoint and not self.has_running_statistics:
            raise ValueError("a checkpoint needs running statistics; pass running_statistics=True")
        if not 1 <= self.checkpoint_interval <= MAX_CHECKPOINT_INTERVAL:
            raise ValueError(
                f"checkpoint_interval={self.checkpoint_interval} is not in the range 1 to "
                f"{MAX_CHECKPOINT_INTERVAL}"
            )


def start_call(options: StreamOptions, first_batch: int, checkpoint: bytes | None) -> ExtractCall:
    """Build the messages that begin a connection."""
    start = pb.ExtractStreamStart(
        model_id=options.model_id,
        taps=wire_taps(options.taps, options.wire),
        max_chunk_bytes=None
        if options.chunk_bytes is None
        else byte_count(options.chunk_bytes, "chunk_bytes"),
        first_batch_index=first_batch,
        batch_timeout_s=options.batch_timeout_s,
        start_at=options.start.at or "",
        start_inputs=options.start.inputs(),
        has_running_statistics=options.has_running_statistics,
        checkpoint_byte_count=len(checkpoint or b""),
        checkpoint_interval=options.checkpoint_interval,
        edits=options.surgery.wire_edits(),
        objective=options.surgery.wire_objective(),
        execution=options.execution.to_wire(),
        adapter=options.adapter,
        direction_fit=options.direction_fit,
    )
    head = pb.ExtractStreamRequest(start=start).SerializeToString()
    own = [memoryview(checkpoint)] if checkpoint else []
    return ExtractCall(head, [*tap_payloads(options.taps), *options.surgery.payloads(), *own])


def batch_call(index: int, inputs: object, wire: Wire | None = None) -> ExtractCall:
    """Build the messages of one batch; without inputs (None) the server answers with an error."""
    if isinstance(inputs, StoredSamples):
        stored = pb.StoredSamples(dataset_id=inputs.dataset_id, first=inputs.first, count=inputs.count)
        head = pb.ExtractStreamRequest(batch=pb.StreamBatch(batch_index=index, stored=stored))
        return ExtractCall(head.SerializeToString(), [])
    arguments, payloads = wire_inputs(inputs, wire)
    head = pb.ExtractStreamRequest(batch=pb.StreamBatch(batch_index=index, inputs=arguments))
    return ExtractCall(head.SerializeToString(), payloads)


def unsendable(result: BatchResult, error: Exception | None) -> BatchResult:
    """Return the result with the error for which the batch was never sent, if there is one."""
    return result if error is None else replace(result, maps=None, error=error)


class StreamAssembler:
    """Assembles the results of a stream from its messages.

    Args:
        model_id: The model of the call.
        first_index: The index of the first batch that was sent.
        objective_offset: What is added to the value of the objective that the server returns.
        widens: Whether float16 values that were float32 come as float32.

    Attributes:
        end: The stream's end message, with running statistics; None before it is received.
        directions: Of that message: the directions that were fitted.
    """

    def __init__(
        self, model_id: str, first_index: int, objective_offset: float = 0.0, *, widens: bool = False
    ) -> None:
        self._model_id = model_id
        self._widens = widens
        self._objective_offset = objective_offset
        self._next_index = first_index
        self._part: _Part | None = None
        self.end: FeatureMaps | None = None
        self.directions: Sequence[Direction] = ()

    def feed(self, message: bytes) -> Iterator[BatchResult]:
        """Parse the next message and yield the result that it completes, if it does.

        Raises:
            BadReplyError: The message breaks the contract.
        """
        try:
            head, chunks = split_message(message)
            response = pb.ExtractStreamResponse.FromString(head)
        except (WireError, DecodeError) as error:
            raise BadReplyError(f"a message of the stream cannot be decoded: {error}") from error
        if response.WhichOneof("part") is not None:
            self._begin(response)
            self.directions = response.end.directions
        if self._part is None:
            raise BadReplyError("the stream has bytes that belong to no batch")
        for chunk in chunks:
            self._part.place(chunk)
        if self._part.is_complete:
            part, self._part = self._part, None
            yield from self._finish(part)

    def _begin(self, response: pb.ExtractStreamResponse) -> None:
        if self._part is not None or self.end is not None:
            raise BadReplyError("the stream begins something before the end of what it began")
        result = response.result
        if response.HasField("result") and result.batch_index != self._next_index:
            raise BadReplyError(
                f"batch {self._next_index} was expected, batch {result.batch_index} was received"
            )
        self._part = _Part(self._model_id, response, self._objective_offset, self._widens)

    def _finish(self, part: "_Part") -> Iterator[BatchResult]:
        if part.is_end:
            self.end = part.finish()
            return
        index, self._next_index = self._next_index, self._next_index + 1
        yield BatchResult(index, None if part.error else part.finish(), part.error, part.checkpoint)


class _Part:
    """One result, or the end, in progress."""

    def __init__(
        self, model_id: str, response: pb.ExtractStreamResponse, objective_offset: float, widens: bool
    ) -> None:
        result = response.result
        self.is_end = response.HasField("end")
        self.error = error_from_batch(result.error) if result.HasField("error") else None
        end = ExtractResponse(feature_maps=response.end.feature_maps)
        size = result.checkpoint_byte_count
        more = [("checkpoint", size)] if size else []
        self._reply = ReplyAssembler(model_id, more=more, objective_offset=objective_offset, widens=widens)
        self._reply.begin(end if self.is_end else result.reply)
        self.place = self._reply.place
        self.finish = self._reply.finish

    @property
    def is_complete(self) -> bool:
        return self._reply.is_complete

    @property
    def checkpoint(self) -> bytes | None:
        return self._reply.more.get("checkpoint")
