"""`TrainerService`: trainers of the caller, their steps, checkpoints, exports."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc

from trocar_api.v1 import trainer_pb2 as pb
from trocar_api.v1 import trainer_pb2_grpc
from trocar_server.engine.admission import MethodClass
from trocar_server.models import current_flow
from trocar_server.rpc.fields import invalid
from trocar_server.rpc.messages import deadline_of
from trocar_server.rpc.principal import principal_of
from trocar_server.rpc.sending import send
from trocar_server.rpc.train_requests import TrainCall, receive_batch
from trocar_server.rpc.trainer_messages import (
    checkpoint_message,
    eval_message,
    result_message,
    trainer_message,
)
from trocar_server.rpc.trainer_specs import trainer_spec
from trocar_server.telemetry import phase
from trocar_server.training.export import Export
from trocar_server.training.trainer import Trainer
from trocar_server.training.trainers import Trainers

_SERVICE = "trocar_api.v1.TrainerService"
_MAX_REQUEST_ID_CHARACTERS, _MAX_NOTE_CHARACTERS = 64, 256


class TrainerService(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers for trainers."""

    def __init__(self, trainers: Trainers) -> None:
        self._trainers = trainers

    async def CreateTrainer(self, request: pb.CreateTrainerRequest, context: Any) -> pb.CreateTrainerResponse:
        """Make a trainer."""
        if len(request.request_id) > _MAX_REQUEST_ID_CHARACTERS:
            raise invalid("request_id", f"over {_MAX_REQUEST_ID_CHARACTERS} characters")
        spec = trainer_spec(request.spec)
        trainer = await self._trainers.create(principal_of(context), spec, request.request_id)
        return pb.CreateTrainerResponse(trainer=await self._message(trainer))

    async def GetTrainer(self, request: pb.GetTrainerRequest, context: Any) -> pb.GetTrainerResponse:
        """Return one of the caller's own."""
        return pb.GetTrainerResponse(
            trainer=await self._message(await self._get(request.trainer_id, context))
        )

    async def ListTrainers(self, request: pb.ListTrainersRequest, context: Any) -> pb.ListTrainersResponse:
        """List the caller's own."""
        await self._trainers.ready.wait()
        own = self._trainers.of(principal_of(context))
        return pb.ListTrainersResponse(trainers=[await self._message(trainer) for trainer in own])

    async def CloseTrainer(self, request: pb.CloseTrainerRequest, context: Any) -> pb.CloseTrainerResponse:
        """Close one of the caller's own."""
        await self._trainers.close(await self._get(request.trainer_id, context))
        return pb.CloseTrainerResponse()

    async def StepOptimizer(self, request: pb.StepOptimizerRequest, context: Any) -> pb.StepOptimizerResponse:
        """Update weights."""
        trainer = await self._get(request.trainer_id, context)
        number = request.number if request.HasField("number") else None
        applied = await trainer.optimizer_step(number, deadline_of(context))
        return pb.StepOptimizerResponse(result=result_message(applied))

    async def SaveTrainer(self, request: pb.SaveTrainerRequest, context: Any) -> pb.SaveTrainerResponse:
        """Write a checkpoint."""
        if len(request.note) > _MAX_NOTE_CHARACTERS:
            raise invalid("note", f"over {_MAX_NOTE_CHARACTERS} characters")
        trainer = await self._get(request.trainer_id, context)
        saved = await trainer.save(request.note)
        return pb.SaveTrainerResponse(checkpoint=checkpoint_message(saved))

    async def RestoreTrainer(
        self, request: pb.RestoreTrainerRequest, context: Any
    ) -> pb.RestoreTrainerResponse:
        """Go back to a checkpoint."""
        trainer = await self._get(request.trainer_id, context)
        number = request.checkpoint_number if request.HasField("checkpoint_number") else None
        await trainer.restore(number)
        return pb.RestoreTrainerResponse(trainer=await self._message(trainer))

    async def ListCheckpoints(
        self, request: pb.ListCheckpointsRequest, context: Any
    ) -> pb.ListCheckpointsResponse:
        """List what can be restored."""
        trainer = await self._get(request.trainer_id, context)
        found = await trainer.checkpoints()
        return pb.ListCheckpointsResponse(checkpoints=map(checkpoint_message, found))

    async def ExportTrainer(  # type: ignore[override]  # writes to the context
        self, request: pb.ExportTrainerRequest, context: Any
    ) -> None:
        """Stream a safetensors file."""
        trainer = await self._get(request.trainer_id, context)
        is_gradients = request.content == pb.EXPORT_CONTENT_GRADIENTS
        update_count, export = await trainer.export(
            has_optimizer=request.has_optimizer, is_gradients=is_gradients
        )
        if not 0 <= request.offset_bytes <= export.byte_count:
            raise invalid("offset_bytes", f"is not within the {export.byte_count} bytes of the file")
        engine = self._trainers.engine
        with engine.admission.admit(MethodClass.DATA, current_flow()) as held:
            held.add(export.byte_count)
            messages = _export_messages(export, update_count, request.offset_bytes)
            await send(context, messages, engine.limits.stall_timeout_s)

    async def PublishTrainer(
        self, request: pb.PublishTrainerRequest, context: Any
    ) -> pb.PublishTrainerResponse:
        """Make a hosted model of the weights."""
        trainer = await self._get(request.trainer_id, context)
        await self._trainers.publish(trainer, request.model_id, tuple(request.categories))
        return pb.PublishTrainerResponse(model_id=request.model_id)

    async def UnpublishModel(
        self, request: pb.UnpublishModelRequest, context: Any
    ) -> pb.UnpublishModelResponse:
        """Remove a model that the caller published."""
        await self._trainers.unpublish(principal_of(context), request.model_id)
        return pb.UnpublishModelResponse()

    async def Train(  # type: ignore[override]  # on bytes, and writes to the context
        self, requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> None:
        """Receive a batch, run it, answer."""
        deadline = deadline_of(context)
        principal = principal_of(context)
        with self._trainers.engine.admission.admit(MethodClass.TRAIN, current_flow()) as held:
            with phase("receive"):
                call = await receive_batch(requests, self._trainers, principal, held)
            with phase("pass"):
                message = await self._run(call, deadline)
        await context.write(pb.TrainResponse(result=message).SerializeToString())

    async def _run(self, call: TrainCall, deadline: float | None) -> pb.StepResult:
        if call.kind == pb.TRAIN_KIND_EVALUATE:
            evaluated = await call.trainer.evaluate(call.make_batch, deadline)
            call.pace.observe(call.rows, evaluated.result.compute_s)
            return eval_message(evaluated)
        is_step = call.kind == pb.TRAIN_KIND_STEP
        applied = await call.trainer.forward_backward(call.number, call.make_batch, deadline, is_step=is_step)
        call.pace.observe(call.rows, applied.result.compute_s)
        return result_message(applied)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of the methods that carry tensors, with our own chunk codec."""
        train: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self.Train)
        return grpc.method_handlers_generic_handler(_SERVICE, {"Train": train})

    async def _get(self, trainer_id: str, context: Any) -> Trainer:
        return await self._trainers.find(principal_of(context), trainer_id)

    async def _message(self, trainer: Trainer) -> pb.Trainer:
        return trainer_message(trainer, await trainer.describe())


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
            yield message
            is_first = False
