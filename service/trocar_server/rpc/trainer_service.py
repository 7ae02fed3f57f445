"""`TrainerService`: trainers of the caller, their steps, checkpoints, exports."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import trainer_pb2 as pb
from trocar_api.v1 import trainer_pb2_grpc
from trocar_server.errors import ServiceError
from trocar_server.rpc.messages import deadline_of
from trocar_server.rpc.principal import principal_of
from trocar_server.rpc.train_requests import TrainCall, receive_batch
from trocar_server.rpc.trainer_messages import eval_message, result_message, trainer_message
from trocar_server.rpc.trainer_specs import trainer_spec
from trocar_server.training.trainer import Trainer
from trocar_server.training.trainers import Trainers

_SERVICE = "trocar_api.v1.TrainerService"
_MAX_REQUEST_ID_CHARACTERS = 64


class TrainerService(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers for trainers."""

    def __init__(self, trainers: Trainers) -> None:
        self._trainers = trainers

    async def CreateTrainer(self, request: pb.CreateTrainerRequest, context: Any) -> pb.CreateTrainerResponse:
        """Make a trainer."""
        if len(request.request_id) > _MAX_REQUEST_ID_CHARACTERS:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                f"request_id: over {_MAX_REQUEST_ID_CHARACTERS} characters",
                field="request_id",
            )
        spec = trainer_spec(request.spec)
        trainer = await self._trainers.create(principal_of(context), spec, request.request_id)
        return pb.CreateTrainerResponse(trainer=await self._message(trainer))

    async def GetTrainer(self, request: pb.GetTrainerRequest, context: Any) -> pb.GetTrainerResponse:
        """Return one of the caller's own."""
        return pb.GetTrainerResponse(trainer=await self._message(self._get(request.trainer_id, context)))

    async def ListTrainers(self, request: pb.ListTrainersRequest, context: Any) -> pb.ListTrainersResponse:
        """List the caller's own."""
        own = self._trainers.of(principal_of(context))
        return pb.ListTrainersResponse(trainers=[await self._message(trainer) for trainer in own])

    async def CloseTrainer(self, request: pb.CloseTrainerRequest, context: Any) -> pb.CloseTrainerResponse:
        """Close one of the caller's own."""
        await self._trainers.close(self._get(request.trainer_id, context))
        return pb.CloseTrainerResponse()

    async def StepOptimizer(self, request: pb.StepOptimizerRequest, context: Any) -> pb.StepOptimizerResponse:
        """Update weights."""
        trainer = self._get(request.trainer_id, context)
        number = request.number if request.HasField("number") else None
        applied, result = await trainer.optimizer_step(number, deadline_of(context))
        return pb.StepOptimizerResponse(result=result_message(result, applied))

    async def train(
        self, requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> None:
        """Receive a batch, run it, answer."""
        deadline = deadline_of(context)
        principal = principal_of(context)
        call = await receive_batch(requests, self._trainers, principal)
        message = await self._run(call, deadline)
        await context.write(pb.TrainResponse(result=message).SerializeToString())

    async def _run(self, call: TrainCall, deadline: float | None) -> pb.StepResult:
        if call.kind == pb.TRAIN_KIND_EVALUATE:
            return eval_message(await call.trainer.evaluate(call.make_batch, deadline))
        is_step = call.kind == pb.TRAIN_KIND_STEP
        number, result = await call.trainer.forward_backward(
            call.number, call.make_batch, deadline, is_step=is_step
        )
        return result_message(result, number)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of the methods that carry tensors, with our own chunk codec."""
        train: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self.train)
        return grpc.method_handlers_generic_handler(_SERVICE, {"Train": train})

    def _get(self, trainer_id: str, context: Any) -> Trainer:
        return self._trainers.get(principal_of(context), trainer_id)

    async def _message(self, trainer: Trainer) -> pb.Trainer:
        return await self._trainers.engine.owner.run(lambda: trainer_message(trainer))
