"""A batch for a trainer: its messages, and what makes it a batch on the thread that owns torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from PIL import Image

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import trainer_pb2 as pb
from trocar_server.engine.admission import Reservation
from trocar_server.engine.inputs import build_arguments, check_images, decode_images, tensor_of
from trocar_server.engine.pace import Pace
from trocar_server.engine.plan import ImageInput, TensorInput, row_count, split_arguments
from trocar_server.errors import ServiceError
from trocar_server.rpc.fields import MAX_TEXT_CHARACTERS, invalid
from trocar_server.rpc.inputs import check_request_bytes, tensor_input, to_inputs
from trocar_server.rpc.messages import read_message
from trocar_server.rpc.payloads import PayloadReceiver
from trocar_server.surgery import PassGuard
from trocar_server.telemetry import note_model
from trocar_server.training.batch import Batch
from trocar_server.training.trainer import MakeBatch, Trainer
from trocar_server.training.trainers import Trainers

_KINDS = (pb.TRAIN_KIND_STEP, pb.TRAIN_KIND_FORWARD_BACKWARD, pb.TRAIN_KIND_EVALUATE)
_MAX_TARGETS = 16


@dataclass(frozen=True)
class TrainCall:
    """What a client wants done with a batch."""

    trainer: Trainer
    kind: pb.TrainKind.ValueType
    number: int | None
    make_batch: MakeBatch
    rows: int
    pace: Pace
    """What such work of the trainer has taken so far."""


async def receive_batch(
    requests: AsyncIterator[bytes], trainers: Trainers, principal: str, held: Reservation
) -> TrainCall:
    """Read a call: check its head, then receive its bytes and decode its images.

    Args:
        requests: Its messages.
        trainers: One of which it is for.
        principal: Who makes it.
        held: What its bytes are reserved in.

    Raises:
        ServiceError: What is wrong with it, before any byte of it is kept.
    """
    first = await anext(requests, None)
    if first is None:
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, "the call has no message")
    request, chunks = read_message(pb.TrainRequest, first)
    note_model(request.trainer_id)
    trainer = await trainers.find(principal, request.trainer_id)
    if request.kind not in _KINDS:
        raise invalid("kind", "not set, or not known")
    limits, hosted = trainers.engine.limits, trainer.core.hosted
    inputs, byte_counts = to_inputs(request.inputs, limits)
    check_images(hosted, inputs)
    targets = _targets(request.targets, trainers, byte_counts)
    check_request_bytes(byte_counts, limits)
    rows = row_count(inputs)
    pace = trainer.eval_pace if request.kind == pb.TRAIN_KIND_EVALUATE else trainer.pace
    held.reserve(sum(byte_counts), rows)
    if pace.is_known:
        held.expect(pace.seconds(rows))
    receiver = PayloadReceiver(byte_counts)
    receiver.feed(chunks)
    while not receiver.is_complete:
        message = await anext(requests, None)
        if message is None:
            break
        receiver.feed(read_message(pb.TrainRequest, message)[1])
    payloads = receiver.finish()
    own = payloads[: len(payloads) - len(targets)]
    images: list[list[Image.Image]] = [[] for _ in inputs]
    if any(isinstance(entry, ImageInput) for entry in inputs):
        images = await asyncio.to_thread(
            decode_images, inputs, own, limits.max_image_pixels, limits.max_request_bytes
        )

    def make_batch(guard: PassGuard) -> Batch:
        arguments = build_arguments(hosted, inputs, own, images, guard)
        positional, keyword = split_arguments([entry.name for entry in inputs], arguments)
        compared = {
            target.name: tensor_of(target.dtype, target.shape, payload).to(hosted.device)
            for target, payload in zip(targets, payloads[len(own) :], strict=True)
        }
        return Batch(tuple(positional), keyword, compared, len(arguments[0]))

    number = request.number if request.HasField("number") else None
    if number is not None and number < 0:
        raise invalid("number", f"{number} is negative")
    return TrainCall(trainer, request.kind, number, make_batch, rows, pace)


def _targets(messages: Sequence[pb.Target], trainers: Trainers, byte_counts: list[int]) -> list[TensorInput]:
    if len(messages) > _MAX_TARGETS:
        raise invalid("targets", f"{len(messages)} given; {_MAX_TARGETS} at most")
    names = [message.name for message in messages]
    if len(set(names)) != len(names):
        raise invalid("targets", "a name is given twice")
    if any(len(name) > MAX_TEXT_CHARACTERS for name in names):
        raise invalid("targets", f"a name has over {MAX_TEXT_CHARACTERS} characters")
    limits = trainers.engine.limits
    return [
        tensor_input(f"targets[{i}].tensor", message.name, message.tensor, limits, byte_counts)
        for i, message in enumerate(messages)
    ]
