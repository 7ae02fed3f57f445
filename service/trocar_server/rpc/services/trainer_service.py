"""`TrainerService`: trainers of the caller, their steps, checkpoints, exports."""

from collections.abc import AsyncIterator, Iterator
from math import isnan
from operator import itemgetter

import grpc

from trocar_api.v1 import trainer_pb2 as pb
from trocar_api.v1 import trainer_pb2_grpc
from trocar_api.v1.extraction_pb2 import ServerTiming
from trocar_server.engine.schedule.admission import MethodClass
from trocar_server.models import current_flow, current_principal
from trocar_server.rpc.call.principal import principal_of
from trocar_server.rpc.call.repeated import is_repeated
from trocar_server.rpc.codec.fields import check_request_id, invalid
from trocar_server.rpc.codec.stored.named_directions import NamedDirections
from trocar_server.rpc.codec.stored.trainer_edits import trainer_edits
from trocar_server.rpc.codec.text import sendable
from trocar_server.rpc.codec.trainer_specs import spec_message, trainer_spec
from trocar_server.rpc.listen.registration import Handler
from trocar_server.rpc.transfer.messages import Arrivals, CallContext, deadline_of, send
from trocar_server.rpc.transfer.train_requests import BatchPlans, TrainCall, receive_batch
from trocar_server.telemetry import phase
from trocar_server.training.files.checkpoint_files import Checkpoint
from trocar_server.training.files.export import Export
from trocar_server.training.files.trainer_store import UnreadableTrainer
from trocar_server.training.model.description import TrainerDescription
from trocar_server.training.trainer import Trainer
from trocar_server.training.trainer_calls import Applied, Evaluated
from trocar_server.training.trainers import Trainers

_MAX_NOTE_CHARACTERS = 256


class TrainerService(trainer_pb2_grpc.TrainerServiceServicer):
    """Servicer of trainers.

    Args:
        trainers: The trainers.
        directions: Resolves the directions of their edits.
    """

    def __init__(self, trainers: Trainers, directions: NamedDirections) -> None:
        self._trainers = trainers
        self._directions = directions
        self._batches = BatchPlans()

    async def CreateTrainer(
        self, request: pb.CreateTrainerRequest, context: CallContext
    ) -> pb.CreateTrainerResponse:
        """Create a trainer."""
        check_request_id(request.request_id)
        principal, sent = principal_of(context), request.spec
        await self._trainers.ready.wait()  # until then published models may be missing
        max_edits = self._trainers.engine.limits.max_edits
        edits = await trainer_edits(self._directions, principal, sent.model_id, sent.edits, max_edits)
        spec = trainer_spec(sent, edits)
        trainer = await self._trainers.create(principal, spec, request.request_id)
        return pb.CreateTrainerResponse(trainer=await self._message(trainer))

    async def GetTrainer(self, request: pb.GetTrainerRequest, context: CallContext) -> pb.GetTrainerResponse:
        """Return one of the caller's trainers, on request once no call changes it."""
        trainer = await self._get(request.trainer_id, context)
        if request.waits_for_step:
            async with trainer.numbering.at_rest():
                pass
        message = await self._message(trainer)
        return pb.GetTrainerResponse(trainer=message, has_waited=request.waits_for_step)

    async def ListTrainers(
        self, request: pb.ListTrainersRequest, context: CallContext
    ) -> pb.ListTrainersResponse:
        """List the caller's trainers."""
        own, unreadable = await self._trainers.listed(principal_of(context))
        outcome = [await self._message(trainer) for trainer in own]
        return pb.ListTrainersResponse(trainers=[*outcome, *map(_unreadable_message, unreadable)])

    async def CloseTrainer(
        self, request: pb.CloseTrainerRequest, context: CallContext
    ) -> pb.CloseTrainerResponse:
        """Close one of the caller's trainers."""
        await self._trainers.close_any(principal_of(context), request.trainer_id)
        return pb.CloseTrainerResponse()

    async def StepOptimizer(
        self, request: pb.StepOptimizerRequest, context: CallContext
    ) -> pb.StepOptimizerResponse:
        """Update weights."""
        trainer = await self._get(request.trainer_id, context)
        number = request.number if request.HasField("number") else None
        applied = await trainer.optimizer_step(number, deadline_of(context))
        return pb.StepOptimizerResponse(result=_result_message(applied))

    async def SaveTrainer(
        self, request: pb.SaveTrainerRequest, context: CallContext
    ) -> pb.SaveTrainerResponse:
        """Write a checkpoint."""
        if len(request.note) > _MAX_NOTE_CHARACTERS:
            raise invalid("note", f"over {_MAX_NOTE_CHARACTERS} characters")
        check_request_id(request.request_id)
        trainer = await self._get(request.trainer_id, context)
        saved = await trainer.save(request.note, request.request_id)
        return pb.SaveTrainerResponse(checkpoint=_checkpoint_message(saved))

    async def RestoreTrainer(
        self, request: pb.RestoreTrainerRequest, context: CallContext
    ) -> pb.RestoreTrainerResponse:
        """Restore a checkpoint."""
        trainer = await self._get(request.trainer_id, context)
        number = request.checkpoint_number if request.HasField("checkpoint_number") else None
        await trainer.restore(number)
        return pb.RestoreTrainerResponse(trainer=await self._message(trainer))

    async def ListCheckpoints(
        self, request: pb.ListCheckpointsRequest, context: CallContext
    ) -> pb.ListCheckpointsResponse:
        """List the checkpoints that can be restored."""
        trainer = await self._get(request.trainer_id, context)
        problems = dict(await trainer.damaged_checkpoints())
        outcome = [_checkpoint_message(saved) for saved in await trainer.checkpoints()]
        whole = [message for message in outcome if message.number not in problems]
        damaged = [pb.Checkpoint(number=number, problem=why) for number, why in problems.items()]
        return pb.ListCheckpointsResponse(checkpoints=sorted([*whole, *damaged], key=lambda one: one.number))

    async def ExportTrainer(  # type: ignore[override]  # writes to the context
        self, request: pb.ExportTrainerRequest, context: CallContext
    ) -> None:
        """Stream a safetensors file."""
        trainer = await self._get(request.trainer_id, context)
        engine = self._trainers.engine
        with engine.admission.admit(MethodClass.DATA, current_flow()) as reservation:
            expected = await _expected_bytes(trainer, request)  # one over the budget has all of it
            reservation.reserve(min(expected, engine.admission.most_bytes(MethodClass.DATA)))
            update_count, export = await _exported(trainer, request)
            if not 0 <= request.offset_bytes <= export.byte_count:
                raise invalid("offset_bytes", f"is not within the {export.byte_count} bytes of the file")
            reservation.add(export.byte_count - reservation.byte_count)
            messages = _export_messages(export, update_count, request.offset_bytes)
            await send(context, messages, engine.limits.stall_timeout_s)

    async def LoadAdapter(
        self, request_iterator: AsyncIterator[pb.LoadAdapterRequest], context: CallContext
    ) -> pb.LoadAdapterResponse:
        """Replace an adapter's weights by a file's."""
        trainer: Trainer | None = None
        data, request_id = bytearray(), ""
        engine = self._trainers.engine
        arrivals = Arrivals(aiter(request_iterator), engine.limits, pb.LoadAdapterRequest.ByteSize)
        with engine.admission.admit(MethodClass.DATA, current_flow()) as reservation:
            while (request := await arrivals.next()) is not None:
                if trainer is None:
                    check_request_id(request.request_id)
                    request_id = request.request_id
                    trainer = await self._get(request.trainer_id, context)
                reservation.reserve(len(request.data))
                data += request.data
            if trainer is None:
                raise invalid("trainer_id", "the call has no message")
            saved = await trainer.load_adapter(bytes(data), request_id)
        return pb.LoadAdapterResponse(checkpoint=_checkpoint_message(saved))

    async def PublishTrainer(
        self, request: pb.PublishTrainerRequest, context: CallContext
    ) -> pb.PublishTrainerResponse:
        """Publish the weights as a hosted model."""
        trainer = await self._get(request.trainer_id, context)
        await self._trainers.publish(
            trainer,
            request.model_id,
            tuple(request.categories),
            is_repeated=is_repeated(context.invocation_metadata() or ()),
        )
        return pb.PublishTrainerResponse(model_id=request.model_id)

    async def UnpublishModel(
        self, request: pb.UnpublishModelRequest, context: CallContext
    ) -> pb.UnpublishModelResponse:
        """Remove a model that the caller published."""
        await self._trainers.unpublish(principal_of(context), request.model_id)
        return pb.UnpublishModelResponse()

    async def Train(  # type: ignore[override]  # on bytes, and writes to the context
        self, requests: AsyncIterator[bytes], context: CallContext
    ) -> None:
        """Receive a batch, run it, answer."""
        deadline = deadline_of(context)
        principal = current_principal() or principal_of(context)
        with self._trainers.engine.admission.admit(MethodClass.TRAIN, current_flow()) as reservation:
            with phase("receive"):
                call = await receive_batch(
                    requests, self._trainers, principal, reservation, self._batches, deadline
                )
            with phase("pass"):
                message = await self._run(call, deadline)
        await context.write(pb.TrainResponse(result=message).SerializeToString())

    async def _run(self, call: TrainCall, deadline: float | None) -> pb.StepResult:
        if call.kind == pb.TRAIN_KIND_EVALUATE:
            evaluated = await call.trainer.evaluate(call.make_batch, deadline)
            call.throughput.observe(call.rows, evaluated.result.compute_s)
            return _eval_message(evaluated)
        is_step = call.kind == pb.TRAIN_KIND_STEP
        applied = await call.trainer.forward_backward(call.number, call.make_batch, deadline, is_step=is_step)
        call.throughput.observe(call.rows, applied.result.compute_s)
        return _result_message(applied)

    def own_handlers(self) -> dict[str, Handler]:
        """Handlers of the methods that carry tensors, with our own chunk codec."""
        return {"Train": grpc.stream_stream_rpc_method_handler(self.Train)}

    async def _get(self, trainer_id: str, context: CallContext) -> Trainer:
        return await self._trainers.find(principal_of(context), trainer_id)

    async def _message(self, trainer: Trainer) -> pb.Trainer:
        return _trainer_message(trainer, await trainer.describe())


async def _expected_bytes(trainer: Trainer, request: pb.ExportTrainerRequest) -> int:
    """Estimate the bytes of a file before its tensors are copied."""
    facts = await trainer.describe()
    if request.content in (pb.EXPORT_CONTENT_ADAPTER, pb.EXPORT_CONTENT_GRADIENTS):
        return facts.trained_bytes
    return trainer.core.hosted.byte_count + (facts.owned_bytes if request.has_optimizer else 0)


async def _exported(trainer: Trainer, request: pb.ExportTrainerRequest) -> tuple[int, Export]:
    if request.content == pb.EXPORT_CONTENT_ADAPTER:
        return await trainer.export_adapter()
    is_gradients = request.content == pb.EXPORT_CONTENT_GRADIENTS
    return await trainer.export(has_optimizer=request.has_optimizer, is_gradients=is_gradients)


def _export_messages(export: Export, update_count: int, offset: int) -> Iterator[pb.ExportTrainerResponse]:
    """Yield the bytes of a file from an offset on."""
    position, is_first = 0, True
    for piece in export.pieces():
        data = piece[max(0, offset - position) :]
        position += len(piece)
        if data or is_first:
            message = pb.ExportTrainerResponse(data=data)
            if is_first:
                message.byte_count, message.update_count = export.byte_count, update_count
                message.adapter_config = export.adapter_config
            yield message
            is_first = False


def _trainer_message(trainer: Trainer, facts: TrainerDescription) -> pb.Trainer:
    """Describe a trainer's current state.

    Args:
        trainer: The trainer.
        facts: Its composition, from `TrainerCore.describe`.
    """
    return pb.Trainer(
        trainer_id=trainer.trainer_id,
        spec=spec_message(trainer.spec),
        created_at_s=trainer.created_at_s,
        expires_at_s=trainer.expires_at_s,
        next_number=trainer.numbering.next_number,
        update_count=trainer.core.update_count,
        accumulated_count=trainer.core.accumulated_count,
        trainable=facts.trainable,
        trainable_element_count=facts.trainable_count,
        frozen_element_count=facts.frozen_count,
        byte_count=facts.owned_bytes,
        head_path=trainer.core.head_path,
        train_mode=facts.train_mode,
        state=trainer.state,
        learning_rates=trainer.core.learning_rates,
        checkpoint_number=trainer.checkpoint_number,
        skipped_checkpoint_numbers=trainer.skipped_checkpoints,
        notices=map(sendable, trainer.notices),
    )


def _unreadable_message(results: UnreadableTrainer) -> pb.Trainer:
    """Describe a trainer that cannot be restored, as far as known."""
    message = pb.Trainer(
        trainer_id=results.trainer_id,
        state="unreadable",
        problem=sendable(results.error.message),
        problem_reason=results.error.reason,
    )
    if results.record is not None:
        message.created_at_s = results.record.created_at_s
        message.spec.model_id = results.record.base_model_id
    return message


def _result_message(applied: Applied) -> pb.StepResult:
    """Result of a numbered call."""
    result = applied.result
    return pb.StepResult(
        number=applied.number,
        loss=result.loss,
        terms=result.terms,
        sample_count=result.sample_count,
        is_update=result.is_update,
        is_skipped=result.is_skipped,
        update_count=applied.update_count,
        learning_rates=result.learning_rates,
        gradient_norm=None if isnan(result.gradient_norm) else result.gradient_norm,
        changed_counts=map(itemgetter(1), sorted(result.changed.items())),
        saved_byte_count=result.saved_bytes,
        written_byte_count=result.written_bytes,
        timing=ServerTiming(compute_s=result.compute_s),
    )


def _eval_message(evaluated: Evaluated) -> pb.StepResult:
    """Result of an evaluation."""
    result, predictions = evaluated.result, evaluated.predictions
    return pb.StepResult(
        loss=result.loss,
        terms=result.terms,
        sample_count=result.sample_count,
        correct_count=None if predictions is None else predictions.correct_count,
        label_count=None if predictions is None else predictions.label_count,
        timing=ServerTiming(compute_s=result.compute_s),
    )


def _checkpoint_message(checkpoint: Checkpoint) -> pb.Checkpoint:
    """Describe a checkpoint."""
    return pb.Checkpoint(
        number=checkpoint.number,
        created_at_s=checkpoint.created_at_s,
        update_count=checkpoint.update_count,
        next_number=checkpoint.next_number,
        byte_count=checkpoint.byte_count,
        sha256=checkpoint.sha256,
        note=checkpoint.note,
    )
