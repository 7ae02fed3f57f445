"""Train requests: the messages of a batch."""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

from google.protobuf.message import DecodeError

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import trainer_pb2 as pb
from trocar_api.wire import Chunk
from trocar_server.config import Limits
from trocar_server.engine.engine import Engine
from trocar_server.engine.execute.arguments import (
    check_images,
    check_tensors,
)
from trocar_server.engine.execute.binding import bound_inputs
from trocar_server.engine.execute.image_texts import takes_image_texts
from trocar_server.engine.execute.prepared_images import DecodedImages
from trocar_server.engine.request.plan import (
    Payload,
    TensorInput,
)
from trocar_server.engine.schedule.admission import PassThroughput, Reservation
from trocar_server.engine.schedule.room import Room
from trocar_server.errors import ServiceError
from trocar_server.processing.inputs import ProcessorInput
from trocar_server.rpc.codec.fields import MAX_TEXT_CHARACTERS, invalid
from trocar_server.rpc.codec.inputs import check_request_bytes, tensor_input, to_inputs
from trocar_server.rpc.transfer.messages import (
    Arrivals,
    KnownMessages,
    are_whole,
    read_message,
    receive,
    whole_payloads,
)
from trocar_server.telemetry import note_model
from trocar_server.training.losses.batch import BatchPlan, make_batch
from trocar_server.training.losses.token_targets import token_layout
from trocar_server.training.trainer import MakeBatch, Trainer
from trocar_server.training.trainers import Trainers

_KINDS = (pb.TRAIN_KIND_STEP, pb.TRAIN_KIND_FORWARD_BACKWARD, pb.TRAIN_KIND_EVALUATE)
_MAX_TARGETS = 16
_MOST_KEY_BYTES = 2048
"""Size limit of a kept description: its size in memory is proportional."""


@dataclass(frozen=True)
class TrainCall:
    """The parsed head of a `Train` call."""

    trainer: Trainer
    kind: pb.TrainKind.ValueType
    number: int | None
    make_batch: MakeBatch
    rows: int
    throughput: PassThroughput
    """Measured cost of the trainer's earlier work of this kind."""


@dataclass(frozen=True)
class BatchHead:
    """The first message of a call, without its tensors and its number.

    Attributes:
        request: The message; not to be changed.
        key: Its bytes.
    """

    request: pb.TrainRequest
    key: bytes


class BatchPlans:
    """Batches as checked before: a training's are alike. For one event loop.

    Attributes:
        by_trainer: The last batch of each trainer.
    """

    def __init__(self) -> None:
        self.by_trainer: MutableMapping[Trainer, BatchPlan] = WeakKeyDictionary()
        self._known: KnownMessages[BatchHead] = KnownMessages(pb.TrainRequest.NUMBER_FIELD_NUMBER)

    def read(self, message: bytes) -> tuple[BatchHead, int | None, list[Chunk], list[int] | None]:
        """Read the first message of a call.

        Returns:
            Its head, its number, its chunks, and the sizes of the payloads where it is known that each is one
            chunk.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, the bytes are not such a message; `REQUEST_TOO_LARGE`.
        """
        known = self._known.find(message)
        if known is not None and known.layout.varying is not None:
            field = message[known.layout.varying]
            with suppress(DecodeError):
                numbered = pb.TrainRequest.FromString(field)
                if numbered.SerializeToString() == field:  # one number of just so many bytes
                    return known.meaning, numbered.number, known.chunks, known.layout.sizes
        request, chunks = read_message(pb.TrainRequest, message)
        number = request.number if request.HasField("number") else None
        request.ClearField("number")
        head = BatchHead(request, request.SerializeToString(deterministic=True))
        if number is not None and len(head.key) <= _MOST_KEY_BYTES:
            self._known.keep(message, chunks, head)
        return head, number, chunks, None


async def receive_batch(
    requests: AsyncIterator[bytes],
    trainers: Trainers,
    principal: str,
    reservation: Reservation,
    plans: BatchPlans,
    deadline: float | None,
) -> TrainCall:
    """Read a call: check its head, then receive its bytes, process its texts and decode its images.

    Args:
        requests: Its messages.
        trainers: All trainers; one of them is the target.
        principal: The caller.
        reservation: The reservation for its bytes.
        plans: Batches that were checked before.
        deadline: A time of `time.monotonic()` in seconds, or None.

    Raises:
        ServiceError: The call is invalid; raised before any of its bytes are kept, except for what its texts
            or sound become.
    """
    arrivals = Arrivals(requests, trainers.engine.limits, len)
    first = await arrivals.next()
    if first is None:
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, "the call has no message")
    head, number, chunks, sizes = plans.read(first)
    request = head.request
    note_model(request.trainer_id)
    trainer = await trainers.find(principal, request.trainer_id)
    batch = _batch_plan(head, trainer, trainers.engine.limits, plans)
    throughput = trainer.eval_throughput if request.kind == pb.TRAIN_KIND_EVALUATE else trainer.throughput
    expected_s = throughput.known_seconds(batch.rows) or None
    if sizes == batch.byte_counts or are_whole(batch.byte_counts, chunks):
        reservation.reserve(batch.byte_count, batch.rows, seconds=expected_s)
        payloads = whole_payloads(chunks)
    else:
        reservation.check(batch.byte_count, batch.rows, seconds=expected_s)
        payloads = await receive(arrivals, batch.byte_counts, chunks, _chunks, reservation)
        if expected_s is not None:
            reservation.expect(expected_s)
    own: Sequence[Payload] = payloads[: len(payloads) - len(batch.targets)]
    of_targets = payloads[len(own) :]
    if batch.needs_processing:
        batch, own = await _processed(batch, own, trainers.engine, reservation, deadline)
    images: Sequence[DecodedImages] = batch.no_images
    if batch.has_images:
        decode = trainers.engine.preparation.decode
        images = await decode(batch.hosted, batch.inputs, own, reservation.reserve)
    if number is not None and number < 0:
        raise invalid("number", f"{number} is negative")
    made = partial(make_batch, batch, own, of_targets, images)
    return TrainCall(trainer, request.kind, number, made, batch.rows, throughput)


def _batch_plan(head: BatchHead, trainer: Trainer, limits: Limits, plans: BatchPlans) -> BatchPlan:
    """Check what a call says of its batch, unless the last call of the trainer said the same."""
    request, key, hosted = head.request, head.key, trainer.core.hosted
    last = plans.by_trainer.get(trainer)
    if last is not None and last.key == key and last.hosted is hosted and last.limits is limits:
        return last
    if request.kind not in _KINDS:
        raise invalid("kind", "not set, or not known")
    unprocessed: list[ProcessorInput] = []
    inputs, byte_counts = to_inputs(request.inputs, limits, unprocessed)
    are_together = takes_image_texts(hosted, inputs, unprocessed)
    if not are_together:
        check_images(hosted, inputs, limits)
    if not (unprocessed or are_together):
        inputs = bound_inputs(hosted, inputs)
        check_tensors(hosted, inputs)
    targets = _targets(request.targets, limits, byte_counts)
    check_request_bytes(byte_counts, limits)
    losses = trainer.spec.losses
    batch_plan = BatchPlan(key, hosted, limits, losses, inputs, targets, byte_counts, tuple(unprocessed))
    if len(key) <= _MOST_KEY_BYTES:
        plans.by_trainer[trainer] = batch_plan
    return batch_plan


async def _processed(
    batch: BatchPlan,
    own: Sequence[Payload],
    engine: Engine,
    reservation: Reservation,
    deadline: float | None,
) -> tuple[BatchPlan, Sequence[Payload]]:
    """Process a batch's texts and sound; return a batch of tensors and images alone, and its payloads."""
    hosted = batch.hosted
    process = engine.preparation.process_inputs
    made = await process(hosted, batch.inputs, batch.unprocessed, own, deadline, Room(reservation))
    inputs = bound_inputs(hosted, made.inputs)
    check_tensors(hosted, inputs)
    layout = token_layout(made.made, batch.unprocessed)
    return replace(batch, inputs=inputs, unprocessed=(), layout=layout), made.payloads


def _chunks(message: bytes) -> list[Chunk]:
    return read_message(pb.TrainRequest, message)[1]


def _targets(messages: Sequence[pb.Target], limits: Limits, byte_counts: list[int]) -> list[TensorInput]:
    if len(messages) > _MAX_TARGETS:
        raise invalid("targets", f"{len(messages)} given; {_MAX_TARGETS} at most")
    names = [message.name for message in messages]
    if len(set(names)) != len(names):
        raise invalid("targets", "a name is given twice")
    if any(len(name) > MAX_TEXT_CHARACTERS for name in names):
        raise invalid("targets", f"a name has over {MAX_TEXT_CHARACTERS} characters")
    return [
        tensor_input(f"targets[{i}].tensor", message.name, message.tensor, limits, byte_counts)
        for i, message in enumerate(messages)
    ]
