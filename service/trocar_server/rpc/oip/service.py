"""`inference.GRPCInferenceService`: hosted models for clients of the Open Inference Protocol v2."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2

from trocar_api.reasons import ErrorReason
from trocar_server import __version__
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.models import ModelState
from trocar_server.rpc.codec.fields import invalid
from trocar_server.rpc.codec.replies import Parts, join_parts
from trocar_server.rpc.codec.text import sendable
from trocar_server.rpc.listen.health_service import HealthService
from trocar_server.rpc.listen.registration import Handler, protobuf_handler
from trocar_server.rpc.oip import oip_messages as oip
from trocar_server.rpc.oip.counters import VERSION, Counters
from trocar_server.rpc.oip.inference import Inference, Message, entry_of, read_infer_request
from trocar_server.rpc.oip.inference_replies import stream_parts
from trocar_server.rpc.oip.metadata import config, metadata
from trocar_server.rpc.transfer.messages import CallContext, deadline_of, send
from trocar_server.rpc.transfer.prefetch import prefetch
from trocar_server.telemetry import note_model, phase

EXTENSIONS = ("model_repository", "model_configuration", "statistics", "parameters")
NOT_OFFERED = (
    *(
        f"{kind}SharedMemory{verb}"
        for kind in ("System", "Cuda")
        for verb in ("Status", "Register", "Unregister")
    ),
    *("TraceSetting", "LogSettings"),
)
"""The methods that answer UNIMPLEMENTED."""

_STATES = {ModelState.LOADED: "READY", ModelState.LOADING: "LOADING"}
_log = structlog.get_logger("trocar")


class OpenInferenceService:
    """Servicer of the protocol for an engine; requests run as in our own services, with the same limits.

    Args:
        engine: Runs models.
        health: Provides the readiness of the server.
    """

    def __init__(self, engine: Engine, health: HealthService) -> None:
        self._engine = engine
        self._health = health
        self._counters = Counters()
        self._inference = Inference(engine, self._counters)

    async def ServerLive(self, request: Any, context: CallContext) -> Any:
        """Report that the server is live."""
        return oip.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: CallContext) -> Any:
        """Whether the server is ready, equal to its health."""
        is_ready = self._health.status() == health_pb2.HealthCheckResponse.SERVING
        return oip.ServerReadyResponse(ready=is_ready)

    async def ServerMetadata(self, request: Any, context: CallContext) -> Any:
        """Return name, version and the supported parts of the protocol."""
        return oip.ServerMetadataResponse(name="trocar", version=__version__, extensions=EXTENSIONS)

    async def ModelReady(self, request: Any, context: CallContext) -> Any:
        """Whether a model exists and is loaded."""
        try:
            entry = entry_of(self._engine, "name", request.name, request.version)
        except ServiceError as error:
            if error.reason is not ErrorReason.UNKNOWN_MODEL:
                raise
            return oip.ModelReadyResponse(ready=False)
        return oip.ModelReadyResponse(ready=entry.state is ModelState.LOADED)

    async def ModelMetadata(self, request: Any, context: CallContext) -> Any:
        """Describe the inputs and outputs of a model."""
        entry_of(self._engine, "name", request.name, request.version)
        hosted = self._engine.catalogue.loaded(request.name)
        return metadata(hosted, await self._engine.checks.recording(request.name))

    async def ModelConfig(self, request: Any, context: CallContext) -> Any:
        """Describe a model in the terms of Triton's configuration."""
        entry_of(self._engine, "name", request.name, request.version)
        hosted = self._engine.catalogue.loaded(request.name)
        example = await self._engine.checks.recording(request.name)
        return oip.ModelConfigResponse(config=config(hosted, example, self._engine.limits))

    async def ModelInfer(self, message: bytes, context: CallContext) -> Parts:
        """Run one pass."""
        return await self._inference.infer(read_infer_request(message), deadline_of(context))

    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], context: CallContext) -> None:
        """Answer requests in their order; one that fails does not end the stream.

        The next pass runs while a reply is sent. The server stops reading from a caller that does not read
        its replies.
        """
        async with aclosing(prefetch(self._answers(requests, deadline_of(context)))) as answers:
            async for parts in answers:
                with phase("reply"):
                    await send(context, [parts], self._engine.limits.stall_timeout_s)

    async def _answers(
        self, requests: AsyncIterator[bytes], deadline: float | None
    ) -> AsyncGenerator[Parts, None]:
        async for data in requests:
            message = read_infer_request(data)
            yield await self._answer(message, deadline)
            del data, message

    async def _answer(self, message: Message, deadline: float | None) -> Parts:
        try:
            return stream_parts(await self._inference.infer(message, deadline))
        except ServiceError as error:
            return _failure(message.request, error)
        except Exception as error:  # noqa: BLE001 - a defect fails this request, not the stream
            _log.error("defect in a stream", exc_info=error)
            problem = "the server failed on this request; its log has the details"
            return _failure(message.request, ServiceError(ErrorReason.INTERNAL, problem))

    async def ModelStatistics(self, request: Any, context: CallContext) -> Any:
        """Return the counts of one model, or of all."""
        if request.name:
            entries = [entry_of(self._engine, "name", request.name, request.version)]
        else:
            entries = self._engine.catalogue.entries()
        return oip.ModelStatisticsResponse(model_stats=map(self._counters.describe, entries))

    async def RepositoryIndex(self, request: Any, context: CallContext) -> Any:
        """List the catalogue."""
        _check_repository(request.repository_name)
        response = oip.RepositoryIndexResponse()
        for entry in self._engine.catalogue.entries():
            state = _STATES.get(entry.state, "UNAVAILABLE")
            if state == "READY" or not request.ready:
                response.models.add(
                    name=entry.spec.model_id,
                    version=VERSION,
                    state=state,
                    reason=sendable(entry.error_message) if state == "UNAVAILABLE" else "",
                )
        return response

    async def RepositoryModelLoad(self, request: Any, context: CallContext) -> Any:
        """Load a model of the catalogue, or a torchvision model by name; one that is loaded stays so."""
        _check_repository(request.repository_name)
        for name, parameter in request.parameters.items():
            if name != "weights" or not parameter.HasField("string_param"):
                raise invalid(
                    f"parameters['{name[:80]}']",
                    "clients choose `weights` by name and nothing else; the operator configures models",
                )
        note_model(request.model_name)
        weights = request.parameters["weights"].string_param if request.parameters else ""
        self._engine.catalogue.request(request.model_name, weights)
        await self._engine.deployments.load(request.model_name)
        return oip.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, context: CallContext) -> Any:
        """Drop a model from memory."""
        _check_repository(request.repository_name)
        note_model(request.model_name)
        await self._engine.deployments.unload(request.model_name)
        return oip.RepositoryModelUnloadResponse()

    def own_handlers(self) -> dict[str, Handler]:
        """Handlers without protobuf's copies of tensors, and of methods that are not offered."""
        infer: Handler = grpc.unary_unary_rpc_method_handler(
            self.ModelInfer, request_deserializer=None, response_serializer=join_parts
        )
        stream: Handler = grpc.stream_stream_rpc_method_handler(
            self.ModelStreamInfer, request_deserializer=None, response_serializer=join_parts
        )
        methods = oip.SERVICE.methods_by_name
        refused = {name: protobuf_handler(methods[name], _not_offered) for name in NOT_OFFERED}
        return {**refused, "ModelInfer": infer, "ModelStreamInfer": stream}


async def _not_offered(request: Any, context: CallContext) -> Any:
    raise ServiceError(
        ErrorReason.UNIMPLEMENTED,
        f"{type(request).DESCRIPTOR.name.removesuffix('Request')} is not offered: this server accepts "
        "no shared memory regions of clients, and its traces and log are the operator's to set",
    )


def _check_repository(name: str) -> None:
    if name:
        raise invalid("repository_name", "there is one repository, and it has no name; leave it empty")


def _failure(request: Any, error: ServiceError) -> Parts:
    response = oip.ModelStreamInferResponse(error_message=sendable(error.message))
    result = response.infer_response
    result.model_name, result.model_version, result.id = request.model_name, VERSION, request.id
    result.parameters["reason"].string_param = error.reason
    return [response.SerializeToString()]
