"""Messages of the wire to the client's own data."""

import numpy as np

from trocar._extraction_plan import ExtractionPlan
from trocar._feature_maps import FeatureMapInfo
from trocar._modules import ModuleInfo, ModuleTree, OutputInfo
from trocar._statistics import Statistics, StatisticValue
from trocar._taps import SCOPES, STATISTICS
from trocar._tensors import DTYPE_NAMES
from trocar._types import Model, Preprocessing, ServerInfo, ServerLimits
from trocar.errors import BadReplyError
from trocar_api.v1 import extraction_pb2, model_pb2, server_pb2

_STATISTIC_NAMES: dict[int, str] = {number: name for name, number in STATISTICS.items()}
_SCOPE_NAMES: dict[int, str] = {number: name for name, number in SCOPES.items()}
_STATES: dict[int, str] = {
    model_pb2.MODEL_STATE_UNLOADED: "unloaded",
    model_pb2.MODEL_STATE_LOADING: "loading",
    model_pb2.MODEL_STATE_LOADED: "loaded",
    model_pb2.MODEL_STATE_FAILED: "failed",
}


def model(message: model_pb2.Model) -> Model:
    """Convert a catalogue entry."""
    has_preprocessing = message.HasField("preprocessing")
    return Model(
        model_id=message.model_id,
        state=_STATES.get(message.state, "unknown"),
        family=message.family,
        architecture=message.architecture,
        weights=message.weights,
        parameter_count=message.parameter_count,
        byte_count=message.byte_count,
        device=message.device,
        dtype=DTYPE_NAMES.get(message.dtype),
        preprocessing=preprocessing(message.preprocessing) if has_preprocessing else None,
        categories=tuple(message.categories),
        input_shape=tuple(message.input_shape),
        error_message=message.error_message,
    )


def preprocessing(message: model_pb2.Preprocessing) -> Preprocessing:
    """Convert what the server does to images."""
    return Preprocessing(
        description=message.description,
        resize=tuple(message.resize),
        crop=tuple(message.crop),
        mean=tuple(message.mean),
        std=tuple(message.std),
        interpolation=message.interpolation,
    )


def module_tree(message: model_pb2.ListModulesResponse) -> ModuleTree:
    """Convert the modules of a model."""
    modules = [
        ModuleInfo(
            path=module.path,
            type=module.type,
            parameter_count=module.parameter_count,
            calls=tuple(tuple(output_info(output) for output in call.outputs) for call in module.calls),
            description=module.description,
        )
        for module in message.modules
    ]
    return ModuleTree(modules, is_symbolic=message.is_symbolic)


def output_info(message: model_pb2.OutputValue) -> OutputInfo:
    """Convert one leaf of what a module returned."""
    is_tensor = message.HasField("tensor")
    return OutputInfo(
        pick=message.pick,
        type=message.type,
        shape=tuple(message.tensor.shape) if is_tensor else None,
        dtype=DTYPE_NAMES.get(message.tensor.dtype) if is_tensor else None,
        byte_count=message.byte_count,
    )


def server_info(message: server_pb2.GetServerInfoResponse) -> ServerInfo:
    """Convert version, device and limits."""
    limits = message.limits
    return ServerInfo(
        version=message.version,
        torch_version=message.torch_version,
        device=message.device,
        limits=ServerLimits(
            max_request_bytes=limits.max_request_bytes,
            max_reply_bytes=limits.max_reply_bytes,
            max_chunk_bytes=limits.max_chunk_bytes,
            max_batch=limits.max_batch,
            max_taps=limits.max_taps,
            max_image_pixels=limits.max_image_pixels,
            max_queue=limits.max_queue,
        ),
    )


def feature_map_info(message: extraction_pb2.FeatureMap) -> FeatureMapInfo:
    """Convert where a feature map came from.

    Raises:
        BadReplyError: It has values of a dtype that is not one of the contract's.
    """
    if message.has_values and message.tensor.dtype not in DTYPE_NAMES:
        raise BadReplyError(f"the dtype {message.tensor.dtype} of {message.name!r} is unknown to this client")
    return FeatureMapInfo(
        name=message.name,
        path=message.path,
        type=message.type,
        call_index=message.call_index,
        port=message.port,
        pick=message.pick,
        shape=tuple(message.tensor.shape),
        dtype=DTYPE_NAMES.get(message.tensor.dtype, "other"),
        has_values=message.has_values,
        byte_count=message.byte_count,
        companion_of=message.companion_of,
    )


def extraction_plan(model_id: str, message: extraction_pb2.PlanResponse) -> ExtractionPlan:
    """Convert the outcome of a dry run."""
    return ExtractionPlan(
        model_id=model_id,
        feature_maps={entry.name: feature_map_info(entry) for entry in message.feature_maps},
        expansions={entry.selector: tuple(entry.names) for entry in message.expansions},
        stopped_at=message.stopped_at if message.HasField("stopped_at") else None,
        reply_bytes=message.reply_byte_count,
        request_bytes=message.request_byte_count,
        memory_bytes=message.memory_byte_count,
        is_symbolic=message.is_symbolic,
    )


def statistics(message: extraction_pb2.FeatureMap) -> Statistics:
    """Convert the statistics of a feature map.

    Raises:
        BadReplyError: A single number was due and another count came.
    """
    over = _SCOPE_NAMES.get(message.scope, "all")
    values: dict[str, StatisticValue] = {}
    for entry in message.statistics:
        name = _STATISTIC_NAMES.get(entry.statistic, str(entry.statistic))
        if over != "all":
            values[name] = np.array(entry.values, dtype=np.float64)
        elif len(entry.values) == 1:
            values[name] = int(entry.values[0]) if name.endswith("_count") else entry.values[0]
        else:
            raise BadReplyError(
                f"{len(entry.values)} values came for the {name} over all of {message.name!r}"
            )
    channel_dim = message.channel_dim if message.HasField("channel_dim") else None
    return Statistics(values, over=over, channel_dim=channel_dim)
