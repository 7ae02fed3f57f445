"""Deserialisation: messages of the wire to the client's own data."""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from trocar._base.dimensions import TokenGrid
from trocar._base.server_status import CacheStatus, CallerStatus, DeviceStatus, QueueStatus, ServerStatus
from trocar._base.tensors import DTYPE_NAMES
from trocar._base.types import DrainState, Feature, Model, ModelInput, Preprocessing, ServerInfo, ServerLimits
from trocar._request.taps import SCOPES, STATISTICS
from trocar._result.extraction_plan import ExtractionPlan
from trocar._result.feature_maps import CastInfo, FeatureMapInfo, by_selector
from trocar._result.modules import ModuleInfo, ModuleTree, OutputInfo
from trocar._result.processed import ProcessedInput, ProcessedSample
from trocar._result.statistics import AnyStatistic, Histogram, Statistics
from trocar.errors import BadReplyError
from trocar_api.v1 import extraction_pb2, model_pb2, reduction_pb2, server_pb2, statistics_pb2

_STATISTIC_NAMES: dict[int, str] = {number: name for name, number in STATISTICS.items()}
_WHOLE = frozenset(("nan_count", "inf_count", "count", "argmax_channel"))
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
        inputs=tuple(model_input(entry) for entry in message.inputs),
        stages={stage.name: stage.selector for stage in message.stages},
        digest=message.digest,
        digest_parts=dict(sorted(message.digest_parts.items())),
        generates=message.generates,
    )


def model_input(message: model_pb2.ModelInput) -> ModelInput:
    """Convert one argument of a model's forward."""
    named = [dimension for dimension in message.dimensions if dimension.name]
    return ModelInput(
        name=message.name,
        dtype=message.dtype.removeprefix("flag:"),
        shape=tuple(dimension.name or dimension.size for dimension in message.dimensions),
        is_optional=message.is_optional,
        below=message.below if message.HasField("below") else None,
        largest={dimension.name: dimension.size for dimension in named if dimension.size},
        is_flag=message.dtype.startswith("flag:"),
    )


def preprocessing(message: model_pb2.Preprocessing) -> Preprocessing:
    """Convert the server's preprocessing of images."""
    return Preprocessing(
        description=message.description,
        resize=tuple(message.resize),
        crop=tuple(message.crop),
        mean=tuple(message.mean),
        std=tuple(message.std),
        interpolation=message.interpolation,
        longest=message.longest,
        scale=message.scale if message.HasField("scale") else 1 / 255,
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
        axes=tuple(message.axes),
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
            max_pass_bytes=limits.max_pass_bytes,
            max_edits=limits.max_edits,
            max_dataset_bytes=limits.max_dataset_bytes,
            max_trainers=limits.max_trainers,
            trainer_ttl_s=limits.trainer_ttl_s,
            max_checkpoints=limits.max_checkpoints,
            feature_cache_bytes=limits.feature_cache_bytes,
            max_pending_bytes=limits.max_pending_bytes,
            max_principal_bytes=limits.max_principal_bytes,
            max_pending_s=limits.max_pending_s,
            max_principal_s=limits.max_principal_s,
            stall_timeout_s=limits.stall_timeout_s,
            max_shared_memory_bytes=limits.max_shared_memory_bytes,
        ),
        server_id=message.server_id,
        is_draining=message.is_draining,
        features=tuple(Feature(one.name, one.is_on, one.reason) for one in message.features),
    )


def drain_state(message: server_pb2.DrainResponse) -> DrainState:
    """Convert the progress of a drain."""
    return DrainState(message.is_draining, message.running_call_count, message.waiting_fit_count)


def server_status(message: server_pb2.GetServerStatusResponse) -> ServerStatus:
    """Convert queues, callers, caches and the device."""
    return ServerStatus(
        queues=tuple(
            QueueStatus(one.model_id, one.replica_count, one.leased_count, one.waiting_count, one.pending_s)
            for one in message.queues
        ),
        callers=tuple(map(_caller_status, message.callers)),
        total=_caller_status(message.total),
        caches=tuple(
            CacheStatus(
                one.name, one.entry_count, one.byte_count, one.max_bytes, one.hit_count, one.miss_count
            )
            for one in message.caches
        ),
        device=DeviceStatus(message.device.user, message.device.held_s, message.device.is_over_limit),
    )


def _caller_status(message: server_pb2.CallerStatus) -> CallerStatus:
    return CallerStatus(
        caller=message.caller,
        call_count=message.call_count,
        waiting_count=message.waiting_count,
        byte_count=message.byte_count,
        pending_s=message.pending_s,
        used_s=message.used_s,
    )


def feature_map_info(message: extraction_pb2.FeatureMap) -> FeatureMapInfo:
    """Convert the metadata of a feature map.

    Raises:
        BadReplyError: It has a dtype that is not one of the contract's.
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
        cast=_cast(message.cast) if message.HasField("cast") else None,
        token_positions=tuple(map(_positions, message.token_positions)),
        axes=tuple(message.axes),
        token_grids=tuple(map(_token_grid, message.token_grids)),
        token_texts={entry.token_id: entry.text for entry in message.token_texts},
    )


def _token_grid(message: extraction_pb2.TokenGrid) -> TokenGrid:
    return TokenGrid(message.dimension, tuple(message.sizes), message.first)


def _positions(message: extraction_pb2.TokenPositions) -> tuple[int, ...]:
    return tuple(message.positions)


def _cast(message: reduction_pb2.CastResult) -> CastInfo:
    return CastInfo(
        original_dtype=DTYPE_NAMES.get(message.original_dtype, "other"),
        scales=tuple(message.scales),
        channel_dim=message.channel_dim if message.HasField("channel_dim") else None,
        max_error=message.max_error,
    )


def extraction_plan(model_id: str, message: extraction_pb2.PlanResponse) -> ExtractionPlan:
    """Convert the outcome of a dry run."""
    names = expansions(message.expansions)
    return ExtractionPlan(
        model_id=model_id,
        feature_maps=by_selector(
            {entry.name: feature_map_info(entry) for entry in message.feature_maps}, names
        ),
        expansions=names,
        stopped_at=message.stopped_at if message.HasField("stopped_at") else None,
        reply_bytes=message.reply_byte_count,
        request_bytes=message.request_byte_count,
        memory_bytes=message.memory_byte_count,
        is_symbolic=message.is_symbolic,
        edit_expansions=expansions(message.edit_expansions),
    )


def statistics(
    message: extraction_pb2.FeatureMap, covariance: NDArray[np.float64] | None = None
) -> Statistics:
    """Convert the statistics of a feature map.

    Args:
        message: The description of the feature map.
        covariance: Its covariance, which is sent as a separate feature map.

    Raises:
        BadReplyError: The count of numbers is wrong.
    """
    over = _SCOPE_NAMES.get(message.scope, "all")
    values: dict[str, AnyStatistic] = {}
    rank_error = 0.0
    for entry in message.statistics:
        name = _STATISTIC_NAMES.get(entry.statistic, str(entry.statistic))
        if name == "covariance":
            continue
        try:
            values[name] = _statistic(name, entry, None if over == "all" else _group_count(message))
        except ValueError as error:
            raise BadReplyError(f"the {name} over {over} of {message.name!r}: {error}") from error
        rank_error = max(rank_error, entry.rank_error)
    return Statistics(
        values,
        over=over,
        channel_dim=message.channel_dim if message.HasField("channel_dim") else None,
        rank_error=rank_error,
        covariance=covariance,
    )


def _group_count(message: extraction_pb2.FeatureMap) -> int:
    shape = message.tensor.shape
    dim = message.channel_dim if message.HasField("channel_dim") else _samples_dim(message)
    if not 0 <= dim < len(shape):
        raise ValueError(f"a tensor of {len(shape)} dimensions has no dimension {dim}")
    return shape[dim]


def _samples_dim(message: extraction_pb2.FeatureMap) -> int:
    return next((dim for dim, name in enumerate(message.axes) if name in ("batch", "images")), 0)


def _statistic(name: str, entry: statistics_pb2.StatisticResult, groups: int | None) -> AnyStatistic:
    """Convert one statistic.

    Args:
        name: Its name.
        entry: As received.
        groups: Number of channels or samples; None when it is over all.
    """
    numbers = np.array(entry.values, dtype=np.float64)
    if name == "histogram":
        return _histogram(numbers, np.array(entry.edges, dtype=np.float64), groups)
    if name == "quantiles":
        return numbers if groups is None else _per_group(numbers, groups)
    if groups is not None:
        return numbers
    if len(numbers) != 1:
        raise ValueError(f"{len(numbers)} values received")
    number: float = numbers.item()
    return int(number) if name in _WHOLE and math.isfinite(number) else number


def _histogram(numbers: NDArray[np.float64], edges: NDArray[np.float64], groups: int | None) -> Histogram:
    bins = len(edges) - 1
    if bins < 1 or len(numbers) != bins * (1 if groups is None else groups):
        raise ValueError(f"{len(numbers)} counts received with {len(edges)} edges")
    if not (np.abs(numbers) <= 2**53).all():
        raise ValueError("a count is not a number")
    counts = numbers.astype(np.int64)
    return Histogram(counts if groups is None else counts.reshape(groups, bins), edges)


def _per_group(numbers: NDArray[np.float64], groups: int) -> NDArray[np.float64]:
    if len(numbers) % max(groups, 1):
        raise ValueError(f"{len(numbers)} values came for {groups} groups")
    return numbers.reshape(groups, len(numbers) // max(groups, 1))


def expansions(entries: Iterable[extraction_pb2.SelectorExpansion]) -> dict[str, tuple[str, ...]]:
    """Return the names that each selector became; of one that was given twice, all of both."""
    result: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        result[entry.selector] = tuple(dict.fromkeys((*result.get(entry.selector, ()), *entry.names)))
    return result


def processed_input(message: extraction_pb2.ProcessedInput) -> ProcessedInput:
    """Read what a processor made of one input."""
    samples = tuple(
        ProcessedSample(
            sample.length,
            tuple(sample.token_ids),
            tuple(sample.tokens),
            tuple(zip(sample.starts, sample.ends, strict=False)),
            tuple(sample.is_special),
            sample.rendered,
        )
        for sample in message.samples
    )
    return ProcessedInput(
        samples,
        message.padded_length,
        message.pads_left,
        tuple(message.arguments),
        message.processor_digest.hex(),
        message.name,
    )
