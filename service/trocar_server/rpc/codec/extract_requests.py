"""Codec of extract requests: from an `ExtractRequest` to a plan, with every check that needs no model."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1.stream_pb2 import ExtractStreamStart
from trocar_api.v1.tap_pb2 import Tap
from trocar_server.config import Limits
from trocar_server.engine.request.plan import EditRequest, Plan, StartAt, TapRequest
from trocar_server.processing.inputs import ProcessorInput
from trocar_server.rpc.codec.edits import NO_LISTS, StoredList, edits_from_wire
from trocar_server.rpc.codec.execution import to_execution
from trocar_server.rpc.codec.fields import invalid
from trocar_server.rpc.codec.inputs import (
    check_argument_count,
    check_request_bytes,
    source_names,
    tensor_input,
    to_inputs,
    to_sources,
)
from trocar_server.rpc.codec.objectives import objective_from_wire
from trocar_server.rpc.codec.positions import check_prompt_alone, selects_tokens
from trocar_server.rpc.codec.reductions import operand_byte_counts
from trocar_server.rpc.codec.selector_parts import selector_from_text
from trocar_server.rpc.codec.tap_requests import tap_requests
from trocar_server.tensors.reductions import Positions

DEFAULT_CHUNK_BYTES = 1 << 20
_MIN_CHUNK_BYTES = 4096


def to_plan(
    request: pb.ExtractRequest,
    limits: Limits,
    stored: Mapping[str, StoredList] = NO_LISTS,
    *,
    needs_inputs: bool = True,
    needs_taps: bool = True,
) -> tuple[Plan, list[int]]:
    """Convert and check the first message of a call.

    Args:
        request: The message.
        limits: What a call may not exceed.
        stored: The lists that its edits name.
        needs_inputs: Whether inputs must be described; not required if only parameters are tapped.
        needs_taps: Whether there must be a tap.

    Returns:
        The plan, and the byte count of each expected payload; `split_payloads` sorts the payloads.

    Raises:
        ServiceError: With the field named.
    """
    plan = base_plan(request, limits, stored, source_names(request.sources), needs_taps=needs_taps)
    is_of_pass = any(tap.selector.parameter is None or tap.selector.is_gradient for tap in plan.taps)
    has_inputs = bool(request.inputs) or (needs_inputs and is_of_pass)
    unprocessed: list[ProcessorInput] = []
    given = to_inputs(request.inputs, limits, unprocessed) if has_inputs else ((), [])
    inputs, byte_counts = given
    if unprocessed and plan.start_at is not None:
        raise invalid("start_at", "starts at a value; send that value as an array, not texts or sound")
    sources, of_sources = to_sources(request.sources, limits, needs_inputs=needs_inputs)
    byte_counts += [*plan_operand_bytes(plan), *of_sources]
    check_request_bytes([*byte_counts, stored_bytes(plan)], limits)
    return replace(plan, inputs=inputs, sources=sources, unprocessed=tuple(unprocessed)), byte_counts


def plan_operand_bytes(plan: Plan) -> list[int]:
    """Byte count of each expected tensor of taps, edits and the objective, in this order."""
    return [
        *(count for tap in plan.taps if not tap.stored for count in operand_byte_counts(tap.reductions)),
        *(spec.byte_count for edit in plan.edits if not edit.stored for spec in edit.edit.own_operands),
        *(spec.byte_count for spec in plan.objective_operands),
    ]


def stored_bytes(plan: Plan) -> int:
    """Byte count of the tensors of stored edits and directions: they are not sent, but need memory."""
    of_edits = (
        spec
        for edit in plan.edits
        for index, spec in enumerate(edit.edit.operands)
        if edit.stored or index >= len(edit.edit.own_operands)
    )
    of_taps = (count for tap in plan.taps if tap.stored for count in operand_byte_counts(tap.reductions))
    return sum(spec.byte_count for spec in of_edits) + sum(of_taps)


def base_plan(
    request: pb.ExtractRequest | ExtractStreamStart,
    limits: Limits,
    stored: Mapping[str, StoredList] = NO_LISTS,
    sources: Collection[str] | None = None,
    *,
    needs_taps: bool = True,
) -> Plan:
    """Convert and check the part that batches share: everything but inputs.

    Args:
        request: The request of one call, or of a stream.
        limits: What a call may not exceed.
        stored: The lists that its edits name.
        sources: The names of other inputs; None if not allowed.
        needs_taps: Whether there must be a tap.

    Raises:
        ServiceError: With the field named.
    """
    if not request.model_id:
        raise invalid("model_id", "is empty; give the id of a model, see `trocar models`")
    if not needs_taps <= len(request.taps) <= limits.max_taps:
        raise invalid(
            "taps", f"{len(request.taps)} given; 1 to {limits.max_taps} are needed, for example 'layer4'"
        )
    has_objective = request.HasField("objective")
    plan = Plan(
        request.model_id,
        _taps(request.taps, stored, limits),
        (),
        chunk_bytes(request, limits),
        _start_at(request, limits),
        edits_from_wire("edits", request.edits, limits.max_edits, sources=sources, stored=stored),
        objective_from_wire("objective", request.objective, limits) if has_objective else None,
        execution=to_execution(request.execution),
    )
    _check_combination(plan)
    return with_prompt_positions(plan) if needs_taps else plan


def _taps(
    messages: Sequence[Tap], stored: Mapping[str, StoredList], limits: Limits
) -> tuple[TapRequest, ...]:
    taps = tuple(
        request for i, tap in enumerate(messages) for request in tap_requests(f"taps[{i}]", tap, stored)
    )
    if len(taps) > limits.max_taps:
        raise invalid(
            "taps", f"{len(taps)} with all places of directions; at most {limits.max_taps} are allowed"
        )
    return taps


def _start_at(request: pb.ExtractRequest | ExtractStreamStart, limits: Limits) -> StartAt | None:
    if not request.start_at:
        if request.start_inputs:
            raise invalid("start_inputs", "is set without start_at; set start_at or leave it out")
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


def chunk_bytes(request: pb.ExtractRequest | ExtractStreamStart, limits: Limits) -> int:
    """Maximum payload bytes in one message of the reply.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, it is out of range.
    """
    if not request.HasField("max_chunk_bytes"):
        return min(DEFAULT_CHUNK_BYTES, limits.max_chunk_bytes)
    if not _MIN_CHUNK_BYTES <= request.max_chunk_bytes <= limits.max_chunk_bytes:
        raise invalid("max_chunk_bytes", f"{_MIN_CHUNK_BYTES} to {limits.max_chunk_bytes} are allowed")
    return request.max_chunk_bytes


def with_prompt_positions(plan: Plan) -> Plan:
    """Return a plan whose positions are reductions of taps and regions of edits, as nothing is generated.

    Raises:
        ServiceError: `INVALID_ARGUMENT`: positions of generated tokens, or beside other tokens of a tap.
    """
    taps = tuple(
        tap if tap.positions is None else _tap_at(f"taps[{i}]", tap, tap.positions)
        for i, tap in enumerate(plan.taps)
    )
    edits = tuple(
        request if request.positions is None else _edit_at(f"edits[{i}]", request, request.positions)
        for i, request in enumerate(plan.edits)
    )
    return replace(plan, taps=taps, edits=edits)


def _tap_at(field: str, tap: TapRequest, positions: Positions) -> TapRequest:
    check_prompt_alone(field, positions)
    if any(selects_tokens(entry) for entry in tap.reductions):
        raise invalid(f"{field}.positions", "are given beside other tokens; give one of them")
    return replace(tap, positions=None, reductions=(positions, *tap.reductions))


def _edit_at(field: str, request: EditRequest, positions: Positions) -> EditRequest:
    check_prompt_alone(field, positions)
    region = replace(request.edit.region, tokens=positions)
    return replace(request, positions=None, edit=replace(request.edit, region=region))


def _check_combination(plan: Plan) -> None:
    """Refuse a plan whose parts exclude each other.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with the field named.
    """
    _check_gradients(plan)
    nodes = [tap.selector.text for tap in plan.taps if tap.selector.kind == "fx"]
    if nodes and (plan.edits or plan.objective is not None):
        raise invalid(
            "taps",
            f"'{nodes[0]}' is computed from the traced graph, where edits and gradients do not apply; select "
            "a module, or request nodes in a separate call",
        )


def _check_gradients(plan: Plan) -> None:
    tapped = [tap.selector.text for tap in plan.taps if tap.selector.is_gradient]
    edited = [request.selector.text for request in plan.edits if request.selector.is_gradient]
    if plan.objective is None:
        for text in (*tapped, *edited):
            raise invalid(
                "objective",
                f"'{text}' is a gradient, but the request has no objective; give one: in Python `of=`, "
                "for example of=trocar.logit(207), on the command line `trocar gradients`",
            )
        return
    if plan.start_at is not None:
        raise invalid("start_at", "gradients start at the input; leave start_at out, or the objective")
    if not tapped:
        raise invalid(
            "objective",
            "no tap asks for a gradient; tap one, for example `layer4/grad_out`, in Python `at=`, "
            "or leave the objective out",
        )
