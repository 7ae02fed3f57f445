"""From `Reduction` and `Cast` messages to what the server does with values."""

from collections.abc import Sequence
from types import EllipsisType

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import reduction_pb2 as pb
from trocar_api.v1 import tensor_pb2
from trocar_server.errors import ServiceError
from trocar_server.reductions import (
    Axis,
    Cast,
    Crop,
    Gram,
    Index,
    Pca,
    Pool,
    PoolKind,
    Projection,
    Reduction,
    Slice,
    Take,
    TopK,
    check_reductions,
    constant_specs,
)
from trocar_server.reductions.reduction import MAX_INDEX_ITEMS
from trocar_server.rpc.dtypes import from_wire
from trocar_server.rpc.fields import named

_AXES: dict[pb.Axis.ValueType, Axis] = {
    pb.AXIS_SAMPLES: Axis.SAMPLES,
    pb.AXIS_CHANNELS: Axis.CHANNELS,
    pb.AXIS_TOKENS: Axis.TOKENS,
}
_POOL_KINDS: dict[pb.PoolKind.ValueType, PoolKind] = {
    pb.POOL_KIND_AVG: PoolKind.AVG,
    pb.POOL_KIND_MAX: PoolKind.MAX,
    pb.POOL_KIND_GEM: PoolKind.GEM,
    pb.POOL_KIND_CLS: PoolKind.CLS,
}


def reductions_from_wire(field: str, messages: Sequence[pb.Reduction]) -> tuple[Reduction, ...]:
    """Convert and check the reductions of one tap; `field` is their name in errors.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, `INVALID_TENSOR` or `REDUCTION_REJECTED`, with the field named.
    """
    found = []
    for i, message in enumerate(messages):
        name = f"{field}[{i}]"
        with named(name):
            found.append(_reduction(name, message))
    with named(field):
        check_reductions(found)
    return tuple(found)


def cast_from_wire(field: str, message: pb.Cast) -> Cast:
    """Convert and check a cast.

    Raises:
        ServiceError: `INVALID_ARGUMENT` or `INVALID_TENSOR`, with the field named.
    """
    dtype = from_wire(f"{field}.dtype", message.dtype)
    with named(field):
        return Cast(dtype, message.is_per_channel)


def constant_byte_counts(reductions: Sequence[Reduction]) -> list[int]:
    """Return the bytes of each tensor that comes with these reductions, in the order of the payloads."""
    return [spec.byte_count for spec in constant_specs(reductions)]


def _reduction(field: str, message: pb.Reduction) -> Reduction:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise _invalid("no kind is set")
    if kind == "pca":
        return _pca(field, message.pca)
    if kind == "gram":
        return Gram(message.gram.is_normalized)
    if kind == "projection":
        return Projection(message.projection.component_count, message.projection.seed)
    if kind == "top_k":
        top_k = message.top_k
        return TopK(top_k.k, top_k.dim if top_k.HasField("dim") else -1, top_k.is_smallest)
    return _selection(message)


def _selection(message: pb.Reduction) -> Reduction:
    kind = message.WhichOneof("kind")
    if kind == "index":
        return index_from_wire(message.index)
    if kind == "take":
        return take_from_wire(message.take)
    if kind == "crop":
        crop = message.crop
        return Crop(crop.top, crop.left, crop.height, crop.width)
    pool = message.pool
    if pool.kind not in _POOL_KINDS:
        raise _invalid(f"pool kind {pool.kind} is unset or unknown")
    return Pool(_POOL_KINDS[pool.kind], tuple(pool.size), pool.power if pool.HasField("power") else 3.0)


def index_from_wire(message: pb.IndexReduction) -> Index:
    """Convert an index expression.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    count = len(message.items)
    if count > MAX_INDEX_ITEMS:  # said before millions of them become objects
        raise _invalid(f"{count} index items; at most {MAX_INDEX_ITEMS} are allowed")
    return Index(tuple(_index_item(i, item) for i, item in enumerate(message.items)))


def take_from_wire(message: pb.TakeReduction) -> Take:
    """Convert positions of one dimension.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    if message.axis not in _AXES:
        raise _invalid(f"axis {message.axis} is unset or unknown")
    return Take(_AXES[message.axis], tuple(message.positions))


def _index_item(i: int, item: pb.IndexItem) -> int | Slice | EllipsisType:
    kind = item.WhichOneof("item")
    if kind == "position":
        return item.position
    if kind == "slice":
        bounds = item.slice
        return Slice(
            bounds.start if bounds.HasField("start") else None,
            bounds.stop if bounds.HasField("stop") else None,
            bounds.step if bounds.HasField("step") else None,
        )
    if not item.ellipsis:
        raise _invalid(f"item {i} of the index is unset")
    return ...


def _pca(field: str, message: pb.PcaReduction) -> Pca:
    components = message.components
    dtype, shape = from_wire(f"{field}.pca.components", components.dtype), tuple(components.shape)
    if len(shape) != 2:
        raise _invalid(f"components of shape {shape}; it is (components, channels)")
    has_mean = message.HasField("mean")
    if has_mean:
        _check_mean(f"{field}.pca.mean", message.mean, components)
    return Pca(*shape, dtype, has_mean)


def _check_mean(field: str, mean: tensor_pb2.TensorSpec, components: tensor_pb2.TensorSpec) -> None:
    if mean.dtype != components.dtype or list(mean.shape) != [components.shape[1]]:
        raise ServiceError(
            ErrorReason.INVALID_TENSOR,
            f"{field}: the mean has the dtype of the components and one number per channel, "
            f"{components.shape[1]:,}; it is of shape {tuple(mean.shape)}",
            field=field,
        )


def _invalid(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.INVALID_ARGUMENT, problem)
