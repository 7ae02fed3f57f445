"""Adapters of calls: a request that names one of the caller's LoRA adapters goes to the model that has it."""

from typing import TypeVar

from trocar_api.v1 import extraction_pb2, stream_pb2
from trocar_server.rpc.codec.fields import invalid
from trocar_server.training.trainers import Trainers

_Request = TypeVar("_Request", extraction_pb2.ExtractRequest, stream_pb2.ExtractStreamStart)


async def with_adapter(trainers: Trainers | None, request: _Request, principal: str) -> _Request:
    """Return the same request to the private model that has the adapter that it names; as it is without one.

    Raises:
        ServiceError: `UNKNOWN_TRAINER`, the caller has no such adapter; `INVALID_ARGUMENT`, nor the server.
    """
    if not request.adapter:
        return request
    if trainers is None:
        raise invalid("adapter", "this server has no adapters; its operator has to install trocar[peft]")
    trainer = await trainers.find_adapter(principal, request.model_id, request.adapter)
    adapter = type(request)()
    adapter.CopyFrom(request)
    adapter.model_id = trainer.trainer_id
    adapter.ClearField("adapter")
    return adapter
