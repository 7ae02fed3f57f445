"""Edits, objectives and sources in a request: what goes together, and in which order payloads come."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.wire.wire import request, tensor
from trocar_api.reasons import ErrorReason
from trocar_api.v1 import edit_pb2, objective_pb2, reduction_pb2, stream_pb2, tap_pb2, tensor_pb2
from trocar_api.v1 import extraction_pb2 as pb
from trocar_server.config import Limits
from trocar_server.engine.request.payload_layout import split_payloads
from trocar_server.engine.request.plan import EditRequest, Plan
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.edits import StoredList, tensors_of
from trocar_server.rpc.codec.extract_requests import base_plan, plan_operand_bytes, stored_bytes, to_plan
from trocar_server.surgery import parse_selector
from trocar_server.tensors.edits import Edit, Set
from trocar_server.tensors.reductions import OperandSpec

LIMITS = Limits(max_request_bytes=1 << 12, max_batch=64, max_edits=4)
GRADIENT = tap_pb2.Tap(selector="fc/grad_out")
OBJECTIVE = objective_pb2.Objective(terms=[{"class_score": {"classes": [1]}}])  # type: ignore[list-item]
ZERO = edit_pb2.Edit(selector="fc", zero=edit_pb2.ZeroEdit())


def float32(*shape: int) -> tensor_pb2.TensorSpec:
    return tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=shape)


def set_to_tensor(*shape: int, mask: tensor_pb2.TensorSpec | None = None) -> edit_pb2.Edit:
    region = None if mask is None else edit_pb2.EditRegion(mask=mask)
    return edit_pb2.Edit(selector="fc", set=edit_pb2.Operand(tensor=float32(*shape)), region=region)


def kept(*sizes: int) -> StoredList:
    """A stored list that sets tensors of these sizes, each full of its size."""
    edits = tuple(
        EditRequest(parse_selector("fc"), Edit(Set(OperandSpec(torch.uint8, (size,)))), stored="kept")
        for size in sizes
    )
    return StoredList(edits, tuple(np.full(size, size % 256, np.uint8) for size in sizes))


def planned(stored: Any = None, **fields: Any) -> Plan:
    return to_plan(request(**fields), LIMITS, stored or {})[0]


def refused(**fields: Any) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        planned(**fields)
    return caught.value


def source(name: str, *inputs: pb.Input) -> pb.SourceInputs:
    return pb.SourceInputs(name=name, inputs=inputs)


ALL_PARTS: dict[str, Any] = {
    "inputs": [tensor((1, 3)), tensor((2,), name="x")],
    "taps": [
        tap_pb2.Tap(
            selector="fc/grad_out",
            reductions=[reduction_pb2.Reduction(pca=reduction_pb2.PcaReduction(components=float32(1, 5)))],
        )
    ],
    "edits": [
        set_to_tensor(4, mask=tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_BOOL, shape=[7])),
        edit_pb2.Edit(stored="kept"),
        set_to_tensor(6),
    ],
    "objective": objective_pb2.Objective(
        terms=[{"loss": {"kind": objective_pb2.LOSS_KIND_MSE, "labels": float32(9)}}]  # type: ignore[list-item]
    ),
    "sources": [source("a", tensor((10,)), tensor((11,), name="x")), source("b", tensor((12,)))],
}


def test_payloads_come_in_the_order_of_the_contract() -> None:
    counts = to_plan(request(**ALL_PARTS), LIMITS, {"kept": kept(5)})[1]
    assert counts == [12, 8, 20, 7, 16, 24, 36, 40, 44, 48]


def test_payloads_are_sorted_by_what_they_are_for_and_stored_ones_take_their_place() -> None:
    stored = {"kept": kept(5)}
    plan, counts = to_plan(request(**ALL_PARTS), LIMITS, stored)
    found = split_payloads(plan, [np.zeros(count, np.uint8) for count in counts], tensors_of(stored))
    assert [p.size for p in found.inputs] == [12, 8]
    assert [p.size for p in found.taps] == [20] == [spec.byte_count for spec in plan.tap_operands]
    assert [p.size for p in found.edits] == [7, 16, 5, 24] == [s.byte_count for s in plan.edit_operands]
    assert [p.size for p in found.objective] == [36]
    assert [[p.size for p in payloads] for payloads in found.sources] == [[40, 44], [48]]
    assert found.edits[2].tolist() == [5] * 5


def test_a_list_that_is_named_twice_begins_anew() -> None:
    stored = {"kept": kept(2, 3)}
    plan = planned(stored, edits=[edit_pb2.Edit(stored="kept")] * 2)
    found = split_payloads(plan, [np.zeros(12, np.uint8)], tensors_of(stored))
    assert [payload.tolist() for payload in found.edits] == [[2, 2], [3, 3, 3]] * 2


def test_images_are_a_payload_each_of_sources_too() -> None:
    images = pb.Input(images=pb.ImageBatch(images=[pb.Image(encoded_byte_count=n) for n in (3, 4)]))
    plan, counts = to_plan(request(inputs=[images], sources=[source("a", images)]), LIMITS)
    found = split_payloads(plan, [np.zeros(count, np.uint8) for count in counts])
    assert ([p.size for p in found.inputs], [[p.size for p in s] for s in found.sources]) == (
        [3, 4],
        [[3, 4]],
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"edits": [set_to_tensor(1100)]},
        {"sources": [source("a", tensor((1, 600))), source("b", tensor((1, 600)))]},
        {"edits": [set_to_tensor(600)], "inputs": [tensor((1, 600))]},
        {"edits": [set_to_tensor(2**62, 2**62)]},
    ],
)
def test_everything_counts_in_the_bytes_of_a_request(fields: dict[str, Any]) -> None:
    assert refused(**fields).reason is ErrorReason.REQUEST_TOO_LARGE


def test_tensors_of_stored_edits_count_in_the_room_of_a_request_each_time_they_are_named() -> None:
    stored = {"kept": kept(2000)}
    named = edit_pb2.Edit(stored="kept")
    plan, counts = to_plan(request(edits=[named] * 2), LIMITS, stored)
    assert (stored_bytes(plan), counts) == (4000, [12])
    with pytest.raises(ServiceError) as caught:
        planned(stored, edits=[named] * 3)
    assert caught.value.reason is ErrorReason.REQUEST_TOO_LARGE


def test_what_a_request_says_is_in_the_plan() -> None:
    plan = planned(taps=[GRADIENT], edits=[ZERO], objective=OBJECTIVE, sources=[source("a", tensor((2, 3)))])
    assert [edit.selector.text for edit in plan.edits] == ["fc"]
    assert plan.objective is not None
    assert [(entry.name, len(entry.inputs)) for entry in plan.sources] == [("a", 1)]


def test_a_swap_may_take_values_from_a_source_of_the_same_request_only() -> None:
    swap = edit_pb2.Edit(selector="fc", swap=edit_pb2.SwapEdit(source="a"))
    assert planned(edits=[swap], sources=[source("a", tensor((1, 3)))]).edits
    error = refused(edits=[swap], sources=[source("b", tensor((1, 3)))])
    assert (error.reason, error.details["field"]) == (ErrorReason.UNKNOWN_SOURCE, "edits[0].swap.source")


INVALID = ErrorReason.INVALID_ARGUMENT
NODE = tap_pb2.Tap(selector="fx:add")


@pytest.mark.parametrize(
    ("fields", "reason", "field", "hint"),
    [
        ({"taps": [GRADIENT]}, INVALID, "objective", "of="),
        ({"taps": [tap_pb2.Tap(selector="fc", is_gradient=True)]}, INVALID, "objective", "of="),
        (
            {"edits": [edit_pb2.Edit(selector="fc/grad_in", zero=edit_pb2.ZeroEdit())]},
            INVALID,
            "objective",
            "of=",
        ),
        ({"objective": OBJECTIVE}, INVALID, "objective", "at="),
        ({"taps": [GRADIENT], "objective": OBJECTIVE, "start_at": "fc"}, INVALID, "start_at", "input"),
        ({"start_at": "fc/grad_out"}, INVALID, "start_at", "gradient"),
        ({"taps": [NODE], "edits": [ZERO]}, INVALID, "taps", "module"),
        ({"taps": [GRADIENT, NODE], "objective": OBJECTIVE}, INVALID, "taps", "module"),
        ({"taps": [GRADIENT], "objective": objective_pb2.Objective()}, INVALID, "objective.terms", "64"),
        ({"edits": [ZERO] * 5}, INVALID, "edits", "4"),
        ({"sources": [source("a", tensor((1,)))] * 9}, INVALID, "sources", "8"),
        ({"sources": [source("", tensor((1,)))]}, INVALID, "sources[0].name", "1024"),
        ({"sources": [source("x" * 1025, tensor((1,)))]}, INVALID, "sources[0].name", "1024"),
        ({"sources": [source("a", tensor((1,)))] * 2}, INVALID, "sources[1].name", "unique"),
        ({"sources": [source("a")]}, INVALID, "sources[0].inputs", "none given"),
        (
            {"sources": [source("a", tensor((0, 1)))]},
            ErrorReason.EMPTY_BATCH,
            "sources[0].inputs[0].tensor",
            "at least one sample",
        ),
        (
            {"sources": [source("a", tensor((1,), name="x"), tensor((1,)))]},
            INVALID,
            "sources[0].inputs",
            "before",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_field(
    fields: dict[str, Any], reason: ErrorReason, field: str, hint: str
) -> None:
    error = refused(**fields)
    assert (error.reason, error.details["field"]) == (reason, field)
    assert hint in error.message


def test_the_gradient_of_a_parameter_needs_inputs_though_the_parameter_needs_none() -> None:
    gradient = tap_pb2.Tap(selector="fc/param_grad(weight)")
    assert refused(taps=[gradient], objective=OBJECTIVE, inputs=[]).details["field"] == "inputs"
    assert planned(taps=[tap_pb2.Tap(selector="fc/param(weight)")], inputs=[]).inputs == ()


def test_a_plan_alone_needs_no_inputs_of_sources() -> None:
    plan, _ = to_plan(request(sources=[source("a")], inputs=[]), LIMITS, needs_inputs=False)
    assert [(entry.name, entry.inputs) for entry in plan.sources] == [("a", ())]


def test_a_stream_takes_edits_and_an_objective_and_no_sources() -> None:
    start = stream_pb2.ExtractStreamStart(
        model_id="m", taps=[GRADIENT], edits=[set_to_tensor(4)], objective=ALL_PARTS["objective"]
    )
    plan = base_plan(start, LIMITS)
    assert plan_operand_bytes(plan) == [16, 36]
    start.edits.append(edit_pb2.Edit(selector="fc", swap=edit_pb2.SwapEdit(source="a")))
    with pytest.raises(ServiceError) as caught:
        base_plan(start, LIMITS)
    assert caught.value.details["field"] == "edits[1].swap.source"
    assert "stream" in caught.value.message
