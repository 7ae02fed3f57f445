"""From `Edit` messages to what the engine changes.

    edits = edits_from_wire("edits", request.edits, limits.max_edits, sources=["clean"], stored=found)

Everything is checked that needs no model.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import edit_pb2 as pb
from trocar_server.edits import WHOLE, AddInput, Edit, MeanAblate, Region, Resample, Skip, Swap
from trocar_server.engine.plan import EditRequest, Payload
from trocar_server.errors import ServiceError, unknown
from trocar_server.rpc.constants import constant_from_wire
from trocar_server.rpc.fields import invalid, named
from trocar_server.rpc.operations import operation_from_wire
from trocar_server.rpc.reductions import index_from_wire, take_from_wire
from trocar_server.rpc.selector_parts import selector_of
from trocar_server.rpc.unknown_fields import refuse_unknown_fields

_IS_AFTER_TAPS: dict[pb.EditOrder.ValueType, bool] = {
    pb.EDIT_ORDER_UNSPECIFIED: False,
    pb.EDIT_ORDER_BEFORE_TAPS: False,
    pb.EDIT_ORDER_AFTER_TAPS: True,
}
_AXIS_COUNT = 3


@dataclass(frozen=True)
class StoredList:
    """A stored list of edits, as a plan takes it in."""

    edits: tuple[EditRequest, ...]
    """Each with the list's name as `stored`."""
    constants: tuple[Payload, ...] = ()
    """The bytes of their tensors, in order; they do not travel with the call."""
    digest: bytes = b""
    """SHA-256 of everything in the list."""


NO_LISTS: Mapping[str, StoredList] = {}


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
        messages: As they came.
        max_count: The most edits, those behind stored names included.
        sources: The names of inputs from which swaps may take values; None where there can be none.
        stored: What is behind each stored name; None where there can be none.

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
                field, f"{len(found)} or more with those behind stored names; at most {max_count} are allowed"
            )
    return tuple(found)


def _stored(field: str, message: pb.Edit, stored: Mapping[str, StoredList] | None) -> tuple[EditRequest, ...]:
    others = [descriptor.name for descriptor, _ in message.ListFields() if descriptor.name != "stored"]
    if others:
        raise invalid(field, f"stands for stored edits and sets {others[0]}; leave that out")
    if stored is None:
        raise invalid(f"{field}.stored", "a stored list holds no other list; give its edits themselves")
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
    for problem in _problems(request):
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
            tuple(take_from_wire(take) for take in message.takes),
            constant_from_wire(f"{field}.mask", message.mask) if message.HasField("mask") else None,
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
            advice = f"there is {', '.join(sources)}" if sources else "give its inputs in `sources`"
            raise unknown(ErrorReason.UNKNOWN_SOURCE, "source", source[:80], sources, advice)


def _problems(request: EditRequest) -> Iterator[str]:
    """Say why an operation cannot be made at such a place, whatever the model."""
    selector, operation = request.selector, request.edit.operation
    is_forward = not selector.is_gradient
    if isinstance(operation, AddInput | Skip) and not (is_forward and selector.port == "out"):
        yield "it is for the output of a module; leave the port out"
    if isinstance(operation, Skip) and selector.picks:
        yield "it is for the whole call; leave the pick out"
    if isinstance(operation, Skip) and request.is_after_taps:
        yield "a module that does not run has no value of its own for taps; leave the order out"
    if isinstance(operation, Swap) and not (is_forward and selector.parameter is None):
        yield "values are swapped in the forward pass; select an output or input"
    if isinstance(operation, Swap) and not operation.source and selector.text == operation.selector:
        yield "it would take the place of itself; give another selector, or a source"
    if isinstance(operation, MeanAblate | Resample) and selector.parameter is not None:
        yield "a parameter has no samples; select a value of the pass"
