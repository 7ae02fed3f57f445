"""`ModelService`: the catalogue, and the modules of a model."""

from trocar_api.v1 import model_pb2 as pb
from trocar_api.v1 import model_pb2_grpc
from trocar_server.engine.engine import Engine
from trocar_server.engine.request.plan import Signature, TensorSignature
from trocar_server.models import (
    CatalogueEntry,
    Family,
    HostedModel,
    InputSignature,
    InputSpec,
    ModelState,
    stages_for,
)
from trocar_server.models.huggingface.causal import why_not_causal
from trocar_server.rpc.codec.inputs import check_argument_count, check_request_bytes, tensor_input
from trocar_server.rpc.codec.text import sendable
from trocar_server.rpc.codec.wire_dtypes import spec_to_wire, to_wire
from trocar_server.rpc.transfer.messages import CallContext
from trocar_server.surgery import Leaf, ModuleRecord
from trocar_server.surgery.axes.layout import NO_LAYOUTS, Layout, Layouts
from trocar_server.surgery.structure import format_picks
from trocar_server.telemetry import note_model

_STATES = {
    ModelState.UNLOADED: pb.MODEL_STATE_UNLOADED,
    ModelState.LOADING: pb.MODEL_STATE_LOADING,
    ModelState.LOADED: pb.MODEL_STATE_LOADED,
    ModelState.FAILED: pb.MODEL_STATE_FAILED,
}


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """Servicer of the catalogue."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def ListModels(self, request: pb.ListModelsRequest, context: CallContext) -> pb.ListModelsResponse:
        """List every entry, without categories."""
        models = [_model(entry) for entry in self._engine.catalogue.entries()]
        for model in models:
            model.ClearField("categories")
        return pb.ListModelsResponse(models=models)

    async def GetModel(self, request: pb.GetModelRequest, context: CallContext) -> pb.GetModelResponse:
        """Return one entry, with its digest if that is wanted."""
        entry = self._engine.catalogue.get(request.model_id)
        model = _model(entry)
        if request.has_digest and entry.hosted is not None:
            identity = await self._engine.identity(self._engine.deployment(request.model_id))
            model.digest = identity.digest
            model.digest_parts.update(identity.short_parts)
        return pb.GetModelResponse(model=model)

    async def LoadModel(self, request: pb.LoadModelRequest, context: CallContext) -> pb.LoadModelResponse:
        """Load an entry, or a torchvision model by name."""
        self._engine.catalogue.request(request.model_id, request.weights)
        return pb.LoadModelResponse(model=_model(await self._engine.deployments.load(request.model_id)))

    async def UnloadModel(
        self, request: pb.UnloadModelRequest, context: CallContext
    ) -> pb.UnloadModelResponse:
        """Drop a model from memory."""
        return pb.UnloadModelResponse(model=_model(await self._engine.deployments.unload(request.model_id)))

    async def ListModules(
        self, request: pb.ListModulesRequest, context: CallContext
    ) -> pb.ListModulesResponse:
        """List the modules in execution order."""
        family = self._engine.catalogue.get(request.model_id).family
        recording = await self._engine.checks.described(request.model_id, self._signature(request, family))
        return pb.ListModulesResponse(
            modules=[
                pb.Module(
                    path=record.path,
                    type=record.type_name,
                    parameter_count=record.parameter_count,
                    calls=_calls(record, recording.layouts or NO_LAYOUTS),
                    description=sendable(record.description),
                )
                for record in recording.modules.values()
            ],
            is_symbolic=recording.is_symbolic,
        )

    async def ListReplicas(
        self, request: pb.ListReplicasRequest, context: CallContext
    ) -> pb.ListReplicasResponse:
        """List none: this is no gateway. A gateway asks whether the caller may use the model."""
        self._engine.catalogue.get(request.model_id)
        note_model("")  # clients ask by themselves: no request for the model
        return pb.ListReplicasResponse()

    def _signature(self, request: pb.ListModulesRequest, family: Family) -> Signature | None:
        if not request.inputs:
            return None
        check_argument_count(len(request.inputs))
        byte_counts: list[int] = []
        inputs = [
            tensor_input(f"inputs[{i}]", "", spec, self._engine.limits, byte_counts)
            for i, spec in enumerate(request.inputs)
        ]
        check_request_bytes(byte_counts, self._engine.limits)
        result = tuple(TensorSignature("", entry.dtype, (entry.shape,)) for entry in inputs)
        takes_two = family is Family.OPTICAL_FLOW and len(result) == 1
        return result * 2 if takes_two else result


def _calls(record: ModuleRecord, layouts: Layouts) -> list[pb.ModuleCall]:
    return [
        pb.ModuleCall(
            outputs=[
                _output(leaf, layouts.find(record.path, index, leaf.port, leaf.picks))
                for leaf in call.outputs
            ]
        )
        for index, call in enumerate(record.calls)
    ]


def _output(leaf: Leaf, layout: Layout | None) -> pb.OutputValue:
    return pb.OutputValue(
        pick=sendable(format_picks(leaf.picks)),
        type=leaf.type_name,
        tensor=None if leaf.shape is None else spec_to_wire(leaf.shape, leaf.dtype),
        byte_count=leaf.byte_count,
        axes=() if layout is None else layout.axes,
    )


def _model(entry: CatalogueEntry) -> pb.Model:
    message = pb.Model(
        model_id=entry.spec.model_id,
        state=_STATES[entry.state],
        family=entry.family,
        architecture=entry.spec.architecture,
        weights=entry.weights,
        error_message=sendable(entry.error_message),
    )
    if entry.hosted is not None:
        _add_hosted(message, entry.hosted)
    return message


def _input(signature: InputSignature, spec: InputSpec) -> pb.ModelInput:
    dimensions = [
        pb.ModelDimension(size=size)
        if isinstance(size, int)
        else pb.ModelDimension(name=size, size=signature.largest.get(size, 0))
        for size in spec.shape or ()
    ]
    return pb.ModelInput(
        name=spec.name,
        dtype=spec.dtype,
        dimensions=dimensions,
        is_optional=spec.is_optional,
        below=spec.below or None,
    )


def _add_hosted(message: pb.Model, hosted: HostedModel) -> None:
    message.parameter_count = hosted.parameter_count
    message.byte_count = hosted.byte_count
    message.device = str(hosted.device)
    message.dtype = to_wire(hosted.dtype)
    message.generates = not why_not_causal(hosted.module)
    message.categories.extend(hosted.categories)
    message.input_shape.extend(hosted.input_shape)
    message.inputs.extend(_input(hosted.signature, spec) for spec in hosted.signature.inputs)
    message.stages.extend(
        pb.ModelStage(name=name, selector=selector) for name, selector in stages_for(hosted).items()
    )
    if hosted.preprocessing is not None:
        info = hosted.preprocessing.describe()
        message.preprocessing.CopyFrom(
            pb.Preprocessing(
                description=info.description,
                resize=info.resize,
                crop=info.crop,
                mean=info.mean,
                std=info.std,
                interpolation=info.interpolation,
                longest=info.longest or None,
                scale=info.scale,
            )
        )
