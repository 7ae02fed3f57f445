"""From an `ExtractRequest` to a plan, with every check that needs no model."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1.stream_pb2 import ExtractStreamStart
from trocar_server.config import Limits
from trocar_server.engine.plan import Plan, StartAt
from trocar_server.rpc.combinations import check_combination
from trocar_server.rpc.edits import NO_LISTS, StoredList, edits_from_wire
from trocar_server.rpc.execution import to_execution
from trocar_server.rpc.fields import invalid
from trocar_server.rpc.inputs import check_argument_count, check_request_bytes, tensor_input, to_inputs
from trocar_server.rpc.objectives import objective_from_wire
from trocar_server.rpc.reductions import constant_byte_counts
from trocar_server.rpc.selector_parts import selector_from_text
from trocar_server.rpc.sources import source_names, to_sources
from trocar_server.rpc.taps import tap_request

DEFAULT_CHUNK_BYTES = 1 << 20
_MIN_CHUNK_BYTES = 4096


def to_plan(
    request: pb.ExtractRequest,
    limits: Limits,
    stored: Mapping[str, StoredList] = NO_LISTS,
    *,
    needs_inputs: bool = True,
) -> tuple[Plan, list[int]]:
    """Convert and check the first message of a call.

    Args:
        request: The message.
        limits: What a call may not exceed.
        stored: The lists that its edits name.
        needs_inputs: Whether inputs must be described; never where parameters alone are wanted.

    Returns:
        The plan, and the bytes of each payload that has to come; `split_payloads` sorts these.

    Raises:
        ServiceError: With the field named.
    """
    plan = base_plan(request, limits, stored, source_names(request.sources))
    is_of_pass = any(tap.selector.parameter is None or tap.selector.is_gradient for tap in plan.taps)
    has_inputs = bool(request.inputs) or (needs_inputs and is_of_pass)
    inputs, byte_counts = to_inputs(request.inputs, limits) if has_inputs else ((), [])
    sources, of_sources = to_sources(request.sources, limits, needs_inputs=needs_inputs)
    byte_counts += [*plan_constant_bytes(plan), *of_sources]
    check_request_bytes([*byte_counts, stored_bytes(plan)], limits)
    return replace(plan, inputs=inputs, sources=sources), byte_counts


def plan_constant_bytes(plan: Plan) -> list[int]:
    """Return the bytes of each tensor that has to come for taps, edits and the objective, in this order."""
    return [
        *(count for tap in plan.taps for count in constant_byte_counts(tap.reductions)),
        *(spec.byte_count for edit in plan.edits if not edit.stored for spec in edit.edit.constants),
        *(spec.byte_count for spec in plan.objective_constants),
    ]


def stored_bytes(plan: Plan) -> int:
    """Return the bytes of the tensors of stored edits: they do not travel, but need room."""
    return sum(spec.byte_count for edit in plan.edits if edit.stored for spec in edit.edit.constants)


def base_plan(
    request: pb.ExtractRequest | ExtractStreamStart,
    limits: Limits,
    stored: Mapping[str, StoredList] = NO_LISTS,
    sources: Collection[str] | None = None,
) -> Plan:
    """Convert and check what batches have in common: everything but inputs.

    Args:
        request: Of one call, or of a stream.
        limits: What a call may not exceed.
        stored: The lists that its edits name.
        sources: The names of other inputs; None where there can be none.

    Raises:
        ServiceError: With the field named.
    """
    if not request.model_id:
        raise invalid("model_id", "is required in the first message")
    if not 1 <= len(request.taps) <= limits.max_taps:
        raise invalid("taps", f"{len(request.taps)} given; 1 to {limits.max_taps} are allowed")
    has_objective = request.HasField("objective")
    plan = Plan(
        request.model_id,
        tuple(tap_request(f"taps[{i}]", tap) for i, tap in enumerate(request.taps)),
        (),
        _chunk_bytes(request, limits),
        _start_at(request, limits),
        edits_from_wire("edits", request.edits, limits.max_edits, sources=sources, stored=stored),
        objective_from_wire("objective", request.objective, limits) if has_objective else None,
        execution=to_execution(request.execution),
    )
    check_combination(plan)
    return plan


def _start_at(request: pb.ExtractRequest | ExtractStreamStart, limits: Limits) -> StartAt | None:
    if not request.start_at:
        if request.start_inputs:
            raise invalid("start_inputs", "says what start_at would need, but start_at is empty")
        return None
    selector = selector_from_text("start_at", request.start_at)
    if selector.is_gradient:
        raise invalid("start_at", f"'{selector.text}' is a gradient; a pass starts at a value")
    if request.start_inputs:
        check_argument_count(len(request.start_inputs))
    byte_counts: list[int] = []
    inputs = tuple(
        tensor_input(f"start_inputs[{i}]", "", spec, limits, byte_counts)
        for i, spec in enumerate(request.start_inputs)
    )
    check_request_bytes(byte_counts, limits)
    return StartAt(selector, inputs)


def _chunk_bytes(request: pb.ExtractRequest | ExtractStreamStart, limits: Limits) -> int:
    if not request.HasField("max_chunk_bytes"):
        return min(DEFAULT_CHUNK_BYTES, limits.max_chunk_bytes)
    if not _MIN_CHUNK_BYTES <= request.max_chunk_bytes <= limits.max_chunk_bytes:
        raise invalid("max_chunk_bytes", f"{_MIN_CHUNK_BYTES} to {limits.max_chunk_bytes} are allowed")
    return request.max_chunk_bytes
