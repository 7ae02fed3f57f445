"""Codec of edits: from `Edit` messages to the engine's edits.

    edits = edits_from_wire("edits", request.edits, limits.max_edits, sources=["clean"], stored=found)

Every check that needs no model is made here.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import edit_pb2 as pb
from trocar_server.engine.request.payload_layout import NO_STORED
from trocar_server.engine.request.plan import EditRequest, Payload
from trocar_server.engine.resolve.edit_resolution import place_problems
from trocar_server.errors import ServiceError, unknown
from trocar_server.rpc.codec.declarations import declared
from trocar_server.rpc.codec.fields import invalid, named
from trocar_server.rpc.codec.operations import operation_from_wire
from trocar_server.rpc.codec.reductions import index_from_wire, spans_from_wire
from trocar_server.rpc.codec.selector_parts import selector_of
from trocar_server.rpc.codec.unknown_fields import refuse_unknown_fields
from trocar_server.rpc.codec.wire_dtypes import tensor_operand_from_wire
from trocar_server.tensors.edits import WHOLE, Edit, Region, Swap
from trocar_server.tensors.reductions import Take

_IS_AFTER_TAPS: dict[pb.EditOrder.ValueType, bool] = {
    pb.EDIT_ORDER_UNSPECIFIED: False,
    pb.EDIT_ORDER_BEFORE_TAPS: False,
    pb.EDIT_ORDER_AFTER_TAPS: True,
}
_AXIS_COUNT = 3


@dataclass(frozen=True)
class StoredList:
    """A stored list of edits, as included in a plan."""

    edits: tuple[EditRequest, ...]
    """Each with the list's name as `stored`."""
    operands: tuple[Payload, ...] = ()
    """The bytes of their tensors, in order; they do not travel with the call."""
    digest: bytes = b""
    """SHA-256 of everything in the list."""


NO_LISTS: Mapping[str, StoredList] = {}


def tensors_of(stored: Mapping[str, StoredList]) -> Mapping[str, Sequence[Payload]]:
    """The tensors of stored lists, by name."""
    return {name: found.operands for name, found in stored.items()} if stored else NO_STORED


def edits_from_wire(
    field: str,
    messages: Sequence[pb.Edit],
    max_count: int,
    *,
    sources: Collection[str] | None = None,
    stored: Mapping[str, StoredList] | None = None,
) -> tuple[EditRequest, ...]:
    """Convert and check edits; stored ones are expanded in their place.

    Args:
        field: Their name in errors.
        messages: As received.
        max_count: The most edits, those behind stored names included.
        sources: The names of inputs from which swaps may take values; None if not allowed.
        stored: The list of each stored name; None if not allowed.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, `INVALID_TENSOR`, `INVALID_SELECTOR`, `NON_FINITE_VALUE`,
            `EDIT_NOT_POSSIBLE`, `UNKNOWN_SOURCE` or `UNKNOWN_EDITS`, with the field named.
    """
    if len(messages) > max_count:
        raise invalid(field, f"{len(messages)} given; at most {max_count} are allowed")
    refuse_unknown_fields({f"{field}[{i}]": message for i, message in enumerate(messages)})
    found: list[EditRequest] = []
    for i, message in enumerate(messages):
        name = f"{field}[{i}]"
        with named(name):
            if message.WhichOneof("operation") == "stored":
                found.extend(_stored(name, message, stored))
            else:
                found.append(_request(name, message, sources))
        if len(found) > max_count:
            raise invalid(
                field, f"{len(found)} or more, stored lists included; at most {max_count} are allowed"
            )
    return tuple(found)


def _stored(field: str, message: pb.Edit, stored: Mapping[str, StoredList] | None) -> tuple[EditRequest, ...]:
    others = [descriptor.name for descriptor, _ in message.ListFields() if descriptor.name != "stored"]
    if others:
        raise invalid(field, f"names stored edits, so {others[0]} must be unset")
    if stored is None:
        raise invalid(f"{field}.stored", "a stored list cannot contain another list; give its edits instead")
    if message.stored not in stored:
        raise invalid(
            f"{field}.stored", f"no stored edits '{message.stored[:80]}'", ErrorReason.UNKNOWN_EDITS
        )
    return stored[message.stored].edits


def _request(field: str, message: pb.Edit, sources: Collection[str] | None) -> EditRequest:
    operation = operation_from_wire(field, message)
    if isinstance(operation, Swap) and operation.source:
        _check_source(f"{field}.swap.source", operation.source, sources)
    if message.order not in _IS_AFTER_TAPS:
        raise invalid(f"{field}.order", f"unknown order {message.order}")
    edit = Edit(
        operation,
        _region(f"{field}.region", message.region) if message.HasField("region") else WHOLE,
        message.channel_dim if message.HasField("channel_dim") else None,
    )
    request = EditRequest(selector_of(field, message), edit, _IS_AFTER_TAPS[message.order])
    for problem in place_problems(request):
        raise ServiceError(
            ErrorReason.EDIT_NOT_POSSIBLE,
            f"{field}: {operation} at '{request.selector.text}': {problem}",
            field=field,
            selector=request.selector.text,
        )
    return request


def _region(field: str, message: pb.EditRegion) -> Region:
    with named(field):
        if len(message.takes) > _AXIS_COUNT:
            raise invalid(f"{field}.takes", f"{len(message.takes)} given; there are {_AXIS_COUNT} dimensions")
        return Region(
            index_from_wire(message.index) if message.HasField("index") else None,
            tuple(declared(Take, f"{field}.takes[{i}]", take) for i, take in enumerate(message.takes)),
            tensor_operand_from_wire(f"{field}.mask", message.mask) if message.HasField("mask") else None,
            spans_from_wire(message.spans) if message.HasField("spans") else None,
        )


def _check_source(field: str, source: str, sources: Collection[str] | None) -> None:
    if sources is None:
        raise invalid(
            field,
            "only an edit of a single call can take values from other inputs; in streams and stored lists "
            "swap with a selector of the same pass",
        )
    if source not in sources:
        with named(field):
            advice = f"available: {', '.join(sources)}" if sources else "give its inputs in `sources`"
            raise unknown(ErrorReason.UNKNOWN_SOURCE, "source", source[:80], sources, advice)
