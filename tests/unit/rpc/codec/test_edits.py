"""Edits from the wire: where, which part, stored ones in their place, and every refusal with its field."""

from typing import Any

import pytest
import torch

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import edit_pb2 as pb
from trocar_api.v1 import reduction_pb2, tap_pb2, tensor_pb2
from trocar_server.engine.request.plan import EditRequest
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.edits import StoredList, edits_from_wire
from trocar_server.surgery import parse_selector
from trocar_server.tensors.edits import WHOLE, Add, Edit, Region, Scale, Set, Zero
from trocar_server.tensors.reductions import Axis, Index, OperandSpec, Slice, Take

ZERO = pb.ZeroEdit()
MASK = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_BOOL, shape=[4])
TENSOR = pb.Operand(tensor=tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[4]))
CHANNELS = reduction_pb2.TakeReduction(axis=reduction_pb2.AXIS_CHANNELS, positions=[1, -2])
KEPT = StoredList(
    tuple(EditRequest(parse_selector(path), Edit(Zero()), stored="kept") for path in ("conv", "fc"))
)


OPERATIONS = {field.name for field in pb.Edit.DESCRIPTOR.oneofs_by_name["operation"].fields}


def wire(selector: str = "fc", **fields: Any) -> pb.Edit:
    """Describe an edit; one without an operation gets zeros."""
    return pb.Edit(selector=selector, **(fields if OPERATIONS & fields.keys() else {"zero": ZERO, **fields}))


def read(*messages: pb.Edit, max_count: int = 8, **options: Any) -> tuple[EditRequest, ...]:
    return edits_from_wire("edits", messages, max_count, **options)


def refused(*messages: pb.Edit, **options: Any) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        read(*messages, **options)
    assert caught.value.message.startswith(f"{caught.value.details['field']}: ")
    return caught.value


def test_an_edit_without_more_is_for_the_whole_value_and_before_taps() -> None:
    assert read(wire("fc/in")) == (EditRequest(parse_selector("fc/in"), Edit(Zero(), WHOLE)),)


def test_an_edit_keeps_all_that_it_says() -> None:
    item = reduction_pb2.IndexItem(slice=reduction_pb2.IndexSlice(start=1, step=2))
    region = pb.EditRegion(index=reduction_pb2.IndexReduction(items=[item]), takes=[CHANNELS])
    message = wire(region=region, channel_dim=-1, order=pb.EDIT_ORDER_AFTER_TAPS, set=TENSOR)
    expected = Edit(
        Set(OperandSpec(torch.float32, (4,))),
        Region(Index((Slice(1, None, 2),)), (Take(Axis.CHANNELS, (1, -2)),)),
        -1,
    )
    assert read(message) == (EditRequest(parse_selector("fc"), expected, is_after_taps=True),)


def test_a_mask_comes_before_operands() -> None:
    (request,) = read(wire(region=pb.EditRegion(mask=MASK), add=TENSOR))
    assert request.edit.region == Region(mask=OperandSpec(torch.bool, (4,)))
    assert [spec.dtype for spec in request.edit.operands] == [torch.bool, torch.float32]


def test_a_selector_in_parts_is_the_same_as_its_text() -> None:
    parts = tap_pb2.SelectorParts(path="fc", port="param_grad(weight)")
    (request,) = read(pb.Edit(parts=parts, zero=ZERO))
    assert request.selector == parse_selector("fc/param_grad(weight)")


def test_edits_keep_their_order_and_stored_ones_come_in_their_place() -> None:
    found = read(wire("a"), pb.Edit(stored="kept"), wire("b"), pb.Edit(stored="kept"), stored={"kept": KEPT})
    assert [request.selector.text for request in found] == ["a", "conv", "fc", "b", "conv", "fc"]
    assert [request.stored for request in found] == ["", "kept", "kept", "", "kept", "kept"]


INVALID, PLACE = ErrorReason.INVALID_ARGUMENT, ErrorReason.EDIT_NOT_POSSIBLE


@pytest.mark.parametrize(
    ("message", "reason", "field"),
    [
        (pb.Edit(zero=ZERO), ErrorReason.INVALID_SELECTOR, "edits[0]"),
        (wire("fc]"), ErrorReason.INVALID_SELECTOR, "edits[0]"),
        (wire("x" * 1025), INVALID, "edits[0]"),
        (wire(parts=tap_pb2.SelectorParts(path="fc")), INVALID, "edits[0]"),
        (pb.Edit(zero=ZERO, parts=tap_pb2.SelectorParts(kind=77)), INVALID, "edits[0].parts.kind"),  # type: ignore[arg-type]
        (wire(order=7), INVALID, "edits[0].order"),
        (pb.Edit(selector="fc"), INVALID, "edits[0]"),
        (wire(region=pb.EditRegion(takes=[CHANNELS] * 2)), INVALID, "edits[0].region"),
        (wire(region=pb.EditRegion(takes=[CHANNELS] * 4)), INVALID, "edits[0].region.takes"),
        (wire(region=pb.EditRegion(takes=[CHANNELS], mask=MASK)), INVALID, "edits[0].region"),
        (
            wire(region=pb.EditRegion(takes=[reduction_pb2.TakeReduction(positions=[1])])),
            INVALID,
            "edits[0].region.takes[0].axis",
        ),
        (wire(region=pb.EditRegion(mask=TENSOR.tensor)), INVALID, "edits[0].region"),
        (
            wire(region=pb.EditRegion(mask=tensor_pb2.TensorSpec())),
            ErrorReason.INVALID_TENSOR,
            "edits[0].region.mask",
        ),
        (
            wire(region=pb.EditRegion(index=reduction_pb2.IndexReduction(items=[{}] * 17))),  # type: ignore[list-item]
            INVALID,
            "edits[0].region",
        ),
        (wire(skip=pb.SkipEdit(), region=pb.EditRegion(mask=MASK)), INVALID, "edits[0]"),
        (wire("fc/in", add_input=pb.AddInputEdit()), PLACE, "edits[0]"),
        (wire("fc/grad_out", add_input=pb.AddInputEdit()), PLACE, "edits[0]"),
        (wire("fc/in", skip=pb.SkipEdit()), PLACE, "edits[0]"),
        (wire("fc/grad_out", skip=pb.SkipEdit()), PLACE, "edits[0]"),
        (wire("fc/param(weight)", skip=pb.SkipEdit()), PLACE, "edits[0]"),
        (wire("split[0]", skip=pb.SkipEdit()), PLACE, "edits[0]"),
        (wire(skip=pb.SkipEdit(), order=pb.EDIT_ORDER_AFTER_TAPS), PLACE, "edits[0]"),
        (wire("fc/grad_in", swap=pb.SwapEdit(selector="conv")), PLACE, "edits[0]"),
        (wire("fc/param(weight)", swap=pb.SwapEdit(selector="conv")), PLACE, "edits[0]"),
        (wire("fc", swap=pb.SwapEdit(selector="fc")), PLACE, "edits[0]"),
        (wire("fc/param(weight)", resample=pb.ResampleEdit()), PLACE, "edits[0]"),
        (wire("fc/param_grad(*)", mean_ablate=pb.MeanAblateEdit()), PLACE, "edits[0]"),
        (wire(swap=pb.SwapEdit(source="clean")), INVALID, "edits[0].swap.source"),
        (pb.Edit(stored="kept"), INVALID, "edits[0].stored"),
    ],
)
def test_what_is_wrong_is_refused_with_its_field(message: pb.Edit, reason: ErrorReason, field: str) -> None:
    error = refused(message)
    assert (error.reason, error.details["field"]) == (reason, field)


def test_a_source_that_is_not_there_is_named_with_those_that_are() -> None:
    message = wire(swap=pb.SwapEdit(source="claen"))
    error = refused(message, sources=["clean", "noisy"])
    assert error.reason is ErrorReason.UNKNOWN_SOURCE
    assert error.details["nearest"] == "clean"
    assert "give its inputs" in refused(message, sources=[]).message
    assert read(message, sources=["claen"])


@pytest.mark.parametrize("field", ["selector", "parts", "order", "region", "channel_dim"])
def test_a_stored_edit_sets_nothing_else(field: str) -> None:
    message = pb.Edit(stored="kept")
    if field == "selector":
        message.selector = "fc"
    elif field == "order":
        message.order = pb.EDIT_ORDER_AFTER_TAPS
    elif field == "channel_dim":
        message.channel_dim = 0
    else:
        getattr(message, field).SetInParent()
    error = refused(message, stored={"kept": KEPT})
    assert (error.reason, error.details["field"]) == (INVALID, "edits[0]")
    assert field in error.message


def test_a_stored_name_that_was_not_found_is_refused() -> None:
    assert refused(pb.Edit(stored="lost"), stored={"kept": KEPT}).reason is ErrorReason.UNKNOWN_EDITS


def test_edits_behind_stored_names_count() -> None:
    kept = pb.Edit(stored="kept")
    assert len(read(*[kept] * 4, stored={"kept": KEPT})) == 8
    assert refused(*[kept] * 5, stored={"kept": KEPT}).details["field"] == "edits"
    assert refused(*[wire()] * 9).details["field"] == "edits"


@pytest.mark.parametrize("place", ["edit", "operation", "operand", "region", "index item"])
def test_a_field_of_a_newer_client_is_refused_wherever_it_is(place: str) -> None:
    item = reduction_pb2.IndexItem(position=0)
    index = reduction_pb2.IndexReduction(items=[item, item])
    message = wire(affine=pb.AffineEdit(scale=TENSOR), region=pb.EditRegion(index=index))
    part: Any = {
        "edit": message,
        "operation": message.affine,
        "operand": message.affine.scale.tensor,
        "region": message.region,
        "index item": message.region.index.items[1],
    }[place]
    part.MergeFromString(b"\xf8\x7f\x01")  # field 2047
    error = refused(wire(), message)
    assert (error.reason, error.details["field"]) == (INVALID, "edits[1]")
    assert "newer client" in error.message
    assert "2047" in error.message


def test_an_operation_of_a_newer_client_is_refused_as_such() -> None:
    message = pb.Edit.FromString(pb.Edit(selector="fc").SerializeToString() + b"\xca\x02\x00")  # field 41
    assert "newer client" in refused(message).message


def test_more_parts_than_edits_can_have_are_refused_without_looking_at_all() -> None:
    index = reduction_pb2.IndexReduction(items=[reduction_pb2.IndexItem()] * 70_000)
    error = refused(wire(region=pb.EditRegion(index=index)))
    assert "parts" in error.message


def test_the_text_of_operands_is_not_part_of_the_selector() -> None:
    found = read(wire("fc", scale=pb.Operand(constant=2)), wire("fc", add=pb.Operand(constant=1)))
    assert [request.edit.operation for request in found] == [Scale(2.0), Add(1.0)]
