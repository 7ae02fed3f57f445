"""Codec of reductions: from `Reduction` and `Cast` messages to the server's operations on values."""

from collections.abc import Mapping, Sequence
from types import EllipsisType

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import reduction_pb2 as pb
from trocar_api.v1 import tensor_pb2
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.declarations import declared
from trocar_server.rpc.codec.fields import check_count, named
from trocar_server.rpc.codec.wire_dtypes import from_wire
from trocar_server.tensors.reductions import (
    Cast,
    Crop,
    Gram,
    Grid,
    Index,
    Lens,
    Pca,
    Peak,
    Pool,
    Projection,
    Reduction,
    Slice,
    Spans,
    Take,
    TextSpan,
    TopK,
    check_reductions,
    operand_specs,
)
from trocar_server.tensors.reductions.apply_reductions import MAX_REDUCTIONS
from trocar_server.tensors.reductions.reduction import MAX_INDEX_ITEMS, MAX_POSITIONS

_BY_FIELDS: Mapping[str, type[Take | Crop | Pool | Peak | TopK | Gram | Grid | Projection | Lens]] = {
    "take": Take,
    "crop": Crop,
    "pool": Pool,
    "peak": Peak,
    "top_k": TopK,
    "gram": Gram,
    "grid": Grid,
    "projection": Projection,
    "lens": Lens,
}
"""The reductions whose fields have the names of their messages' fields."""


def reductions_from_wire(field: str, messages: Sequence[pb.Reduction]) -> tuple[Reduction, ...]:
    """Convert and check the reductions of one tap; `field` is their name in errors.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, `INVALID_TENSOR` or `REDUCTION_REJECTED`, with the field named.
    """
    check_count(field, len(messages), MAX_REDUCTIONS, ErrorReason.REDUCTION_REJECTED)
    result = []
    for i, message in enumerate(messages):
        name = f"{field}[{i}]"
        with named(name):
            result.append(_reduction(name, message))
    with named(field):
        check_reductions(result)
    return tuple(result)


def cast_from_wire(field: str, message: pb.Cast) -> Cast:
    """Convert and check a cast.

    Raises:
        ServiceError: `INVALID_ARGUMENT` or `INVALID_TENSOR`, with the field named.
    """
    with named(field):
        return declared(Cast, field, message)


def operand_byte_counts(reductions: Sequence[Reduction]) -> list[int]:
    """Byte count of each operand of these reductions, in the order of the payloads."""
    return [spec.byte_count for spec in operand_specs(reductions)]


def _reduction(field: str, message: pb.Reduction) -> Reduction:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise _invalid("no kind is set")
    if kind == "readout":
        raise _invalid("a readout of a direction is for taps of values")
    if kind == "pca":
        return _pca(field, message.pca)
    if kind == "index":
        return index_from_wire(message.index)
    if kind == "spans":
        return spans_from_wire(message.spans)
    return declared(_BY_FIELDS[kind], f"{field}.{kind}", getattr(message, kind))


def index_from_wire(message: pb.IndexReduction) -> Index:
    """Convert an index expression.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    count = len(message.items)
    if count > MAX_INDEX_ITEMS:  # refused before millions of them become objects
        raise _invalid(f"{count} index items; at most {MAX_INDEX_ITEMS} are allowed")
    return Index(tuple(_index_item(i, item) for i, item in enumerate(message.items)))


def _index_item(i: int, item: pb.IndexItem) -> int | Slice | EllipsisType:
    kind = item.WhichOneof("item")
    if kind == "position":
        return item.position
    if kind == "slice":
        return declared(Slice, f"items[{i}]", item.slice)
    if not item.ellipsis:
        raise _invalid(f"item {i} of the index is unset")
    return ...


def spans_from_wire(message: pb.SpanReduction) -> Spans:
    """Convert spans of texts.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    count = len(message.spans)
    if count > MAX_POSITIONS:  # refused before millions of them become objects
        raise _invalid(f"{count} spans; at most {MAX_POSITIONS:,} are allowed")
    return Spans(tuple(map(span_from_wire, message.spans)), message.is_decoder)


def span_from_wire(span: pb.TextSpan) -> TextSpan:
    """Convert one span.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    if span.WhichOneof("kind") == "characters":
        return TextSpan(characters=(span.characters.start, span.characters.stop))
    return TextSpan(text=span.text, role=span.role)


def _pca(field: str, message: pb.PcaReduction) -> Pca:
    components = message.components
    dtype, shape = from_wire(f"{field}.pca.components", components.dtype), tuple(components.shape)
    if len(shape) != 2:
        raise _invalid(f"components of shape {shape}; it must be (components, channels)")
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
