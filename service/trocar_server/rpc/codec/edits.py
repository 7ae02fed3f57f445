"""Codec of edits: from `Edit` messages to the engine's edits.

    edits = edits_from_wire("edits", request.edits, limits.max_edits, sources=["clean"], stored=found)

Every check that needs no model is made here.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import edit_pb2 as pb
from trocar_api.v1.position_pb2 import Gate as GateMessage
from trocar_api.v1.position_pb2 import Positions
from trocar_server.engine.request.payload_layout import NO_STORED
from trocar_server.engine.request.plan import EditRequest, Payload
from trocar_server.engine.resolve.edit_resolution import place_problems
from trocar_server.errors import ServiceError, unknown
from trocar_server.rpc.codec.declarations import declared
from trocar_server.rpc.codec.fields import invalid, named
from trocar_server.rpc.codec.operations import operation_from_wire
from trocar_server.rpc.codec.positions import positions_from_wire
from trocar_server.rpc.codec.reductions import index_from_wire, spans_from_wire
from trocar_server.rpc.codec.selector_parts import selector_of
from trocar_server.rpc.codec.unknown_fields import refuse_unknown_fields
from trocar_server.rpc.codec.wire_dtypes import tensor_operand_from_wire
from trocar_server.surgery import Selector
from trocar_server.tensors.edits import WHOLE, Edit, Gate, Operation, Region, Swap
from trocar_server.tensors.reductions import Readout, Take

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
    readouts: tuple[tuple[Selector, Readout], ...] = ()
    """For a direction that a tap reads: its places, with the reading of each."""

    @property
    def byte_count(self) -> int:
        """The bytes of its tensors."""
        return sum(operand.nbytes for operand in self.operands)


NO_LISTS: Mapping[str, StoredList] = {}


def tensors_of(stored: Mapping[str, StoredList]) -> Mapping[str, Sequence[Payload]]:
    """The tensors of stored lists, by name."""
    return {name: result.operands for name, result in stored.items()} if stored else NO_STORED


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
    result: list[EditRequest] = []
    for i, message in enumerate(messages):
        name = f"{field}[{i}]"
        with named(name):
            if message.WhichOneof("operation") == "stored":
                result.extend(_stored(name, message, stored))
            elif message.WhichOneof("operation") == "direction":
                result.append(_with_direction(name, message, stored))
            else:
                result.append(_request(name, message, operation_from_wire(name, message), sources, stored))
        if len(result) > max_count:
            raise invalid(
                field, f"{len(result)} or more, stored lists included; at most {max_count} are allowed"
            )
    return tuple(result)


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


def _with_direction(field: str, message: pb.Edit, stored: Mapping[str, StoredList] | None) -> EditRequest:
    """Return an edit with a stored direction, whose tensor does not travel with the call."""
    if stored is None or field not in stored:
        raise invalid(f"{field}.direction", "a stored list takes no direction; name it with the call")
    request = _request(field, message, stored[field].edits[0].edit.operation, None, stored)
    return replace(request, stored=field)


def _request(
    field: str,
    message: pb.Edit,
    operation: Operation,
    sources: Collection[str] | None,
    stored: Mapping[str, StoredList] | None,
) -> EditRequest:
    if isinstance(operation, Swap) and operation.source:
        _check_source(f"{field}.swap.source", operation.source, sources)
    if message.order not in _IS_AFTER_TAPS:
        raise invalid(f"{field}.order", f"unknown order {message.order}")
    edit = Edit(
        operation,
        _region(f"{field}.region", message.region) if message.HasField("region") else WHOLE,
        message.channel_dim if message.HasField("channel_dim") else None,
    )
    positions, gate_name, chosen = None, "", message.positions
    if chosen.HasField("when"):
        gate_name = gate_field(field)
        if stored is None or gate_name not in stored:
            raise invalid(gate_name, "a stored list takes no gate; name it with the call")
        edit = replace(edit, gate=gate_from_wire(gate_name, chosen.when, stored[gate_name]))
        chosen = Positions()
        chosen.CopyFrom(message.positions)
        chosen.ClearField("when")
    if chosen.ListFields() or (message.HasField("positions") and not gate_name):
        positions = positions_from_wire(f"{field}.positions", chosen)
        if not edit.region.may_have_tokens:
            raise invalid(f"{field}.region", "selects more than channels and samples beside positions")
    request = EditRequest(
        selector_of(field, message),
        edit,
        _IS_AFTER_TAPS[message.order],
        positions=positions,
        stored_gate=gate_name,
    )
    for problem in place_problems(request):
        raise ServiceError(
            ErrorReason.EDIT_NOT_POSSIBLE,
            f"{field}: {operation} at '{request.selector.text}': {problem}",
            field=field,
            selector=request.selector.text,
        )
    return request


def gate_field(field: str) -> str:
    """Return the field of an edit's gate, under which it is stored."""
    return f"{field}.positions.when"


def gate_from_wire(name: str, when: GateMessage, direction: StoredList) -> Gate:
    """Convert and check a gate; its tensors do not travel with the call.

    Args:
        name: Its name in errors.
        when: As received.
        direction: What it reads.

    Raises:
        ServiceError: `INVALID_ARGUMENT` or `NON_FINITE_VALUE`, with the field named.
    """
    place, readout = direction.readouts[0]
    vectors, bias = readout.operands()
    limits = {end: getattr(when, end) for end in ("above", "below") if when.HasField(end)}
    if not all(map(math.isfinite, limits.values())):
        raise invalid(name, "a limit is NaN or infinite", ErrorReason.NON_FINITE_VALUE)
    with named(name):
        return Gate(place.text, vectors, bias, **limits)


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
