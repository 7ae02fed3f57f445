"""Operations from the wire: every one is converted, and what is wrong is named with its field."""

import dataclasses
from typing import Any

import pytest
import torch
from google.protobuf.descriptor import FieldDescriptor

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import edit_pb2 as pb
from trocar_api.v1 import tensor_pb2
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.declarations import members_by_number
from trocar_server.rpc.codec.operations import operation_from_wire
from trocar_server.tensors.edits import (
    OPERATIONS,
    Add,
    AddInput,
    Affine,
    Cap,
    Cast,
    Clamp,
    Dropout,
    MeanAblate,
    NanToNum,
    Noise,
    NoiseKind,
    Normalise,
    NormScope,
    Operation,
    Project,
    ProjectOnto,
    Resample,
    Scale,
    Set,
    Skip,
    Steer,
    Swap,
    TopK,
    Zero,
)
from trocar_server.tensors.reductions import OperandSpec

FLOAT32 = tensor_pb2.DTYPE_FLOAT32
NAN, INF = float("nan"), float("inf")


def spec(*shape: int, dtype: tensor_pb2.Dtype.ValueType = FLOAT32) -> tensor_pb2.TensorSpec:
    return tensor_pb2.TensorSpec(dtype=dtype, shape=shape)


def number(value: float) -> pb.Operand:
    return pb.Operand(constant=value)


TENSOR, OURS = pb.Operand(tensor=spec(2, 3)), OperandSpec(torch.float32, (2, 3))

WHOLE: list[tuple[dict[str, Any], Operation]] = [
    ({"set": number(0)}, Set(0.0)),
    ({"set": TENSOR}, Set(OURS)),
    ({"zero": pb.ZeroEdit()}, Zero()),
    ({"add": number(-1.5)}, Add(-1.5)),
    ({"scale": TENSOR}, Scale(OURS)),
    ({"affine": pb.AffineEdit()}, Affine(1.0, 0.0)),
    ({"affine": pb.AffineEdit(scale=TENSOR, shift=number(0))}, Affine(OURS, 0.0)),
    ({"affine": pb.AffineEdit(scale=number(0))}, Affine(0.0, 0.0)),
    ({"clamp": pb.ClampEdit(low=0)}, Clamp(0.0, None)),
    ({"clamp": pb.ClampEdit(high=0)}, Clamp(None, 0.0)),
    ({"clamp": pb.ClampEdit(low=-1, high=1)}, Clamp(-1.0, 1.0)),
    ({"noise": pb.NoiseEdit(kind=pb.NOISE_KIND_UNIFORM, scale=2, seed=-3)}, Noise(NoiseKind.UNIFORM, 2, -3)),
    ({"noise": pb.NoiseEdit(kind=pb.NOISE_KIND_GAUSSIAN)}, Noise(NoiseKind.GAUSSIAN, 0.0, 0)),
    ({"mean_ablate": pb.MeanAblateEdit()}, MeanAblate()),
    ({"mean_ablate": pb.MeanAblateEdit(reference=spec(2, 3))}, MeanAblate(OURS)),
    ({"resample": pb.ResampleEdit(seed=5)}, Resample(5)),
    ({"swap": pb.SwapEdit(source="clean")}, Swap("clean")),
    ({"swap": pb.SwapEdit(source="clean", selector="fc@0/in")}, Swap("clean", "fc@0/in")),
    ({"swap": pb.SwapEdit(selector="conv")}, Swap("", "conv")),
    ({"add_input": pb.AddInputEdit()}, AddInput()),
    ({"steer": pb.SteerEdit(direction=spec(2, 3), alpha=2, keeps_norm=True)}, Steer(OURS, 2.0, True)),
    ({"steer": pb.SteerEdit(direction=spec(2, 3), is_relative=True)}, Steer(OURS, 0.0, is_relative=True)),
    ({"steer": pb.SteerEdit(direction=spec(3))}, Steer(OperandSpec(torch.float32, (3,)), 0.0)),
    ({"cap": pb.CapEdit(direction=spec(3), low=-1)}, Cap(OperandSpec(torch.float32, (3,)), -1.0)),
    ({"project_out": pb.ProjectEdit(basis=spec(2, 3))}, Project(OURS)),
    ({"project_onto": pb.ProjectEdit(basis=spec(2, 3))}, ProjectOnto(OURS)),
    ({"top_k": pb.TopKEdit(k=2)}, TopK(2)),
    ({"top_k": pb.TopKEdit(k=2, dim=0, is_absolute=True)}, TopK(2, 0, is_absolute=True)),
    ({"dropout": pb.DropoutEdit(probability=0.5, seed=9)}, Dropout(0.5, 9)),
    ({"cast": pb.CastEdit(dtype=tensor_pb2.DTYPE_INT8)}, Cast(torch.int8)),
    ({"skip": pb.SkipEdit()}, Skip()),
    ({"normalise": pb.NormaliseEdit(max_norm=1)}, Normalise(1.0, NormScope.SAMPLE)),
    (
        {"normalise": pb.NormaliseEdit(max_norm=1, scope=pb.NORM_SCOPE_ALL, is_exact=True)},
        Normalise(1.0, NormScope.ALL, is_exact=True),
    ),
    ({"nan_to_num": pb.NanToNumEdit()}, NanToNum()),
    ({"nan_to_num": pb.NanToNumEdit(nan=1, posinf=0, neginf=-2)}, NanToNum(1.0, 0.0, -2.0)),
]


@pytest.mark.parametrize(("fields", "expected"), WHOLE)
def test_every_operation_is_converted(fields: dict[str, Any], expected: Operation) -> None:
    assert operation_from_wire("edits[0]", pb.Edit(**fields)) == expected


ON_THE_WIRE = [
    field
    for field in pb.Edit.DESCRIPTOR.oneofs_by_name["operation"].fields
    if field.name not in ("stored", "direction")
]


def test_every_operation_of_the_wire_has_a_declaration_and_the_other_way_round() -> None:
    names = {field.name for field in ON_THE_WIRE}
    assert set(OPERATIONS) == names == {name for fields, _ in WHOLE for name in fields}
    assert all(operation.name == name for name, operation in OPERATIONS.items())


@pytest.mark.parametrize("wire", ON_THE_WIRE, ids=lambda wire: wire.name)
def test_a_message_and_its_declaration_have_the_same_fields(wire: FieldDescriptor) -> None:
    declared = [field.name for field in dataclasses.fields(OPERATIONS[wire.name])]
    assert wire.message_type is not None
    if wire.message_type is pb.Operand.DESCRIPTOR:
        assert len(declared) == 1
    else:
        assert declared == [field.name for field in wire.message_type.fields]


@pytest.mark.parametrize(("wire", "members"), [(pb.NoiseKind, NoiseKind), (pb.NormScope, NormScope)])
def test_enums_have_the_same_members(wire: Any, members: Any) -> None:
    by_number = members_by_number(wire.DESCRIPTOR, members)
    assert list(by_number) == wire.values()[1:]
    assert set(by_number.values()) == set(members)


INVALID, FINITE, TENSOR_WRONG = (
    ErrorReason.INVALID_ARGUMENT,
    ErrorReason.NON_FINITE_VALUE,
    ErrorReason.INVALID_TENSOR,
)


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({}, INVALID, ""),
        ({"set": pb.Operand()}, INVALID, ".set"),
        ({"set": number(NAN)}, FINITE, ".set"),
        ({"add": number(INF)}, FINITE, ".add"),
        ({"scale": number(-INF)}, FINITE, ".scale"),
        ({"set": pb.Operand(tensor=spec(dtype=tensor_pb2.DTYPE_UNSPECIFIED))}, TENSOR_WRONG, ".set"),
        ({"set": pb.Operand(tensor=spec(2, -1))}, TENSOR_WRONG, ".set"),
        ({"set": pb.Operand(tensor=spec(*[1] * 9))}, TENSOR_WRONG, ".set"),
        ({"affine": pb.AffineEdit(scale=pb.Operand())}, INVALID, ".affine.scale"),
        ({"affine": pb.AffineEdit(shift=number(NAN))}, FINITE, ".affine"),
        ({"clamp": pb.ClampEdit()}, INVALID, ".clamp"),
        ({"clamp": pb.ClampEdit(low=1, high=0)}, INVALID, ".clamp"),
        ({"clamp": pb.ClampEdit(low=NAN)}, FINITE, ".clamp"),
        ({"noise": pb.NoiseEdit(scale=1)}, INVALID, ".noise.kind"),
        ({"noise": pb.NoiseEdit(kind=9, scale=1)}, INVALID, ".noise.kind"),  # type: ignore[arg-type]
        ({"noise": pb.NoiseEdit(kind=pb.NOISE_KIND_UNIFORM, scale=-1)}, INVALID, ".noise"),
        ({"noise": pb.NoiseEdit(kind=pb.NOISE_KIND_UNIFORM, scale=NAN)}, FINITE, ".noise"),
        ({"mean_ablate": pb.MeanAblateEdit(reference=spec(-1))}, TENSOR_WRONG, ".mean_ablate.reference"),
        ({"swap": pb.SwapEdit()}, INVALID, ".swap"),
        ({"swap": pb.SwapEdit(source="x" * 1025)}, INVALID, ".swap.source"),
        ({"swap": pb.SwapEdit(selector="x" * 1025)}, INVALID, ".swap.selector"),
        ({"swap": pb.SwapEdit(selector="fc]")}, ErrorReason.INVALID_SELECTOR, ".swap.selector"),
        ({"swap": pb.SwapEdit(selector="fc/grad_out")}, ErrorReason.EDIT_NOT_POSSIBLE, ".swap.selector"),
        ({"swap": pb.SwapEdit(selector="fc/param(weight)")}, ErrorReason.EDIT_NOT_POSSIBLE, ".swap.selector"),
        ({"steer": pb.SteerEdit(alpha=1)}, TENSOR_WRONG, ".steer.direction"),
        ({"steer": pb.SteerEdit(direction=spec(1, 2, 3))}, INVALID, ".steer"),
        ({"steer": pb.SteerEdit(direction=spec(3), alpha=NAN)}, FINITE, ".steer"),
        ({"project_out": pb.ProjectEdit()}, TENSOR_WRONG, ".project_out.basis"),
        ({"project_onto": pb.ProjectEdit(basis=spec(3))}, INVALID, ".project_onto"),
        ({"top_k": pb.TopKEdit()}, INVALID, ".top_k"),
        ({"top_k": pb.TopKEdit(k=-1)}, INVALID, ".top_k"),
        ({"dropout": pb.DropoutEdit(probability=1)}, INVALID, ".dropout"),
        ({"dropout": pb.DropoutEdit(probability=-0.1)}, INVALID, ".dropout"),
        ({"dropout": pb.DropoutEdit(probability=NAN)}, FINITE, ".dropout"),
        ({"cast": pb.CastEdit()}, TENSOR_WRONG, ".cast.dtype"),
        ({"cast": pb.CastEdit(dtype=FLOAT32)}, INVALID, ".cast"),
        ({"normalise": pb.NormaliseEdit()}, INVALID, ".normalise"),
        ({"normalise": pb.NormaliseEdit(max_norm=INF)}, FINITE, ".normalise"),
        ({"normalise": pb.NormaliseEdit(max_norm=1, scope=9)}, INVALID, ".normalise.scope"),  # type: ignore[arg-type]
        ({"nan_to_num": pb.NanToNumEdit(posinf=INF)}, FINITE, ".nan_to_num"),
    ],
)
def test_what_is_wrong_is_named_with_its_field(
    fields: dict[str, Any], reason: ErrorReason, field: str
) -> None:
    with pytest.raises(ServiceError) as refused:
        operation_from_wire("edits[2]", pb.Edit(**fields))
    assert refused.value.reason is reason
    assert refused.value.details["field"] == f"edits[2]{field}"
    assert refused.value.message.startswith(f"edits[2]{field}: ")
