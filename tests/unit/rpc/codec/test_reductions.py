"""Reductions and casts from the wire: what is wrong is named with its field."""

from dataclasses import fields
from types import EllipsisType
from typing import Any

import pytest
import torch

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import reduction_pb2 as pb
from trocar_api.v1 import statistics_pb2, tap_pb2, tensor_pb2
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec import reductions
from trocar_server.rpc.codec.declarations import members_by_number
from trocar_server.rpc.codec.reductions import cast_from_wire, operand_byte_counts, reductions_from_wire
from trocar_server.rpc.codec.tap_requests import tap_request
from trocar_server.tensors.reductions import (
    Axis,
    Cast,
    Crop,
    Gram,
    Grid,
    Index,
    Lens,
    Pca,
    Peak,
    Pool,
    PoolKind,
    Projection,
    Reduction,
    Slice,
    Spans,
    Take,
    TextSpan,
    TopK,
)

FLOAT32, FLOAT64 = tensor_pb2.DTYPE_FLOAT32, tensor_pb2.DTYPE_FLOAT64


def spec(*shape: int, dtype: tensor_pb2.Dtype.ValueType = FLOAT32) -> tensor_pb2.TensorSpec:
    return tensor_pb2.TensorSpec(dtype=dtype, shape=shape)


def item(value: int | EllipsisType) -> pb.IndexItem:
    return pb.IndexItem(ellipsis=True) if value is ... else pb.IndexItem(position=value)


WHOLE = [
    (
        pb.Reduction(
            index=pb.IndexReduction(items=[item(-2), item(...), pb.IndexItem(slice=pb.IndexSlice())])
        ),
        Index((-2, ..., Slice())),
    ),
    (
        pb.Reduction(
            index=pb.IndexReduction(items=[pb.IndexItem(slice=pb.IndexSlice(start=0, stop=-1, step=2))])
        ),
        Index((Slice(0, -1, 2),)),
    ),
    (
        pb.Reduction(take=pb.TakeReduction(axis=pb.AXIS_TOKENS, positions=[3, -1])),
        Take(Axis.TOKENS, (3, -1)),
    ),
    (pb.Reduction(crop=pb.CropReduction(top=1, left=2, height=3, width=4)), Crop(1, 2, 3, 4)),
    (pb.Reduction(pool=pb.PoolReduction(kind=pb.POOL_KIND_MAX, size=[2, 3])), Pool(PoolKind.MAX, (2, 3))),
    (
        pb.Reduction(pool=pb.PoolReduction(kind=pb.POOL_KIND_GEM, power=2.5)),
        Pool(PoolKind.GEM, (), 2.5),
    ),
    (pb.Reduction(gram=pb.GramReduction(is_normalized=True)), Gram(is_normalized=True)),
    (pb.Reduction(grid=pb.GridReduction()), Grid()),
    (pb.Reduction(grid=pb.GridReduction(height=2, width=3, prefix_count=5)), Grid(2, 3, 5)),
    (
        pb.Reduction(
            spans=pb.SpanReduction(
                spans=[
                    pb.TextSpan(characters=pb.CharacterRange(start=2, stop=5)),
                    pb.TextSpan(text="cat"),
                    pb.TextSpan(role="user"),
                ]
            )
        ),
        Spans((TextSpan((2, 5)), TextSpan(text="cat"), TextSpan(role="user"))),
    ),
    (pb.Reduction(projection=pb.ProjectionReduction(component_count=8, seed=-3)), Projection(8, -3)),
    (pb.Reduction(lens=pb.LensReduction(top_k=5)), Lens(5)),
    (pb.Reduction(pca=pb.PcaReduction(components=spec(2, 5))), Pca(2, 5)),
    (
        pb.Reduction(pca=pb.PcaReduction(components=spec(2, 5, dtype=FLOAT64), mean=spec(5, dtype=FLOAT64))),
        Pca(2, 5, torch.float64, has_mean=True),
    ),
    (pb.Reduction(peak=pb.PeakReduction()), Peak()),
    (pb.Reduction(top_k=pb.TopKReduction(k=5)), TopK(5)),
    (pb.Reduction(top_k=pb.TopKReduction(k=5, dim=0, is_smallest=True)), TopK(5, 0, is_smallest=True)),
]


@pytest.mark.parametrize(("message", "expected"), WHOLE)
def test_every_reduction_is_converted(message: pb.Reduction, expected: Reduction) -> None:
    assert reductions_from_wire("reductions", [message]) == (expected,)


def test_every_word_of_the_wire_has_one_of_ours() -> None:
    assert set(members_by_number(pb.Axis.DESCRIPTOR, Axis).values()) == set(Axis)
    assert set(members_by_number(pb.PoolKind.DESCRIPTOR, PoolKind).values()) == set(PoolKind)
    for name, reduction in reductions._BY_FIELDS.items():
        message = pb.Reduction.DESCRIPTOR.fields_by_name[name].message_type
        assert message is not None
        assert [field.name for field in fields(reduction)] == [field.name for field in message.fields]
    assert {message.WhichOneof("kind") for message, _ in WHOLE} == {
        field.name for field in pb.Reduction.DESCRIPTOR.oneofs_by_name["kind"].fields
    } - {"readout"}  # of taps alone, which has a place


def test_constants_are_counted_in_order() -> None:
    found = reductions_from_wire("reductions", [message for message, _ in WHOLE if message.HasField("pca")])
    assert operand_byte_counts(found) == [40, 80, 40]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pb.Reduction(), ErrorReason.INVALID_ARGUMENT),
        (pb.Reduction(index=pb.IndexReduction(items=[pb.IndexItem()])), ErrorReason.INVALID_ARGUMENT),
        (
            pb.Reduction(index=pb.IndexReduction(items=[pb.IndexItem(ellipsis=False)])),
            ErrorReason.INVALID_ARGUMENT,
        ),
        (
            pb.Reduction(index=pb.IndexReduction(items=[pb.IndexItem(slice=pb.IndexSlice(step=0))])),
            ErrorReason.INVALID_ARGUMENT,
        ),
        (pb.Reduction(index=pb.IndexReduction(items=[item(...)] * 2)), ErrorReason.INVALID_ARGUMENT),
        (pb.Reduction(take=pb.TakeReduction(positions=[1])), ErrorReason.INVALID_ARGUMENT),
        (pb.Reduction(take=pb.TakeReduction(axis=pb.AXIS_SAMPLES)), ErrorReason.INVALID_ARGUMENT),
        (
            pb.Reduction(take=pb.TakeReduction(axis=pb.AXIS_SAMPLES, positions=range(65_537))),
            ErrorReason.INVALID_ARGUMENT,
        ),
        (pb.Reduction(crop=pb.CropReduction()), ErrorReason.INVALID_ARGUMENT),
        (pb.Reduction(spans=pb.SpanReduction()), ErrorReason.INVALID_ARGUMENT),
        (pb.Reduction(spans=pb.SpanReduction(spans=[pb.TextSpan()])), ErrorReason.INVALID_ARGUMENT),
        (
            pb.Reduction(spans=pb.SpanReduction(spans=[pb.TextSpan(text="a" * 513)])),
            ErrorReason.INVALID_ARGUMENT,
        ),
        (
            pb.Reduction(
                spans=pb.SpanReduction(spans=[pb.TextSpan(characters=pb.CharacterRange(start=2, stop=2))])
            ),
            ErrorReason.INVALID_ARGUMENT,
        ),
        (pb.Reduction(pool=pb.PoolReduction()), ErrorReason.INVALID_ARGUMENT),
        (pb.Reduction(pool=pb.PoolReduction(kind=pb.POOL_KIND_AVG, size=[-1])), ErrorReason.INVALID_ARGUMENT),
        (
            pb.Reduction(pool=pb.PoolReduction(kind=pb.POOL_KIND_GEM, power=float("nan"))),
            ErrorReason.INVALID_ARGUMENT,
        ),
        (pb.Reduction(top_k=pb.TopKReduction()), ErrorReason.INVALID_ARGUMENT),
        (pb.Reduction(projection=pb.ProjectionReduction()), ErrorReason.INVALID_ARGUMENT),
        (
            pb.Reduction(projection=pb.ProjectionReduction(component_count=2**31 - 1)),
            ErrorReason.INVALID_ARGUMENT,
        ),
        (pb.Reduction(pca=pb.PcaReduction()), ErrorReason.INVALID_TENSOR),
        (pb.Reduction(pca=pb.PcaReduction(components=spec(5))), ErrorReason.INVALID_ARGUMENT),
        (pb.Reduction(pca=pb.PcaReduction(components=spec(-2, -5))), ErrorReason.INVALID_ARGUMENT),
        (pb.Reduction(pca=pb.PcaReduction(components=spec(2**62, 2**62))), ErrorReason.INVALID_ARGUMENT),
        (
            pb.Reduction(pca=pb.PcaReduction(components=spec(2, 5, dtype=tensor_pb2.DTYPE_INT8))),
            ErrorReason.INVALID_ARGUMENT,
        ),
        (
            pb.Reduction(pca=pb.PcaReduction(components=spec(2, 5), mean=spec(2))),
            ErrorReason.INVALID_TENSOR,
        ),
        (
            pb.Reduction(pca=pb.PcaReduction(components=spec(2, 5), mean=spec(5, dtype=FLOAT64))),
            ErrorReason.INVALID_TENSOR,
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_field(message: pb.Reduction, reason: ErrorReason) -> None:
    with pytest.raises(ServiceError) as refused:
        reductions_from_wire("taps[3].reductions", [WHOLE[-3][0], message])
    assert refused.value.reason is reason
    assert refused.value.message.startswith("taps[3].reductions[1]")
    assert refused.value.details["field"].startswith("taps[3].reductions[1]")


@pytest.mark.parametrize("messages", [[WHOLE[3][0]] * 17, [WHOLE[-1][0], WHOLE[3][0]]])
def test_a_chain_that_cannot_be_is_refused(messages: list[pb.Reduction]) -> None:
    with pytest.raises(ServiceError) as refused:
        reductions_from_wire("taps[0].reductions", messages)
    assert refused.value.reason is ErrorReason.REDUCTION_REJECTED
    assert refused.value.details["field"] == "taps[0].reductions"


def test_casts_are_converted() -> None:
    message = pb.Cast(dtype=tensor_pb2.DTYPE_INT8, is_per_channel=True)
    assert cast_from_wire("cast", message) == Cast(torch.int8, is_per_channel=True)
    narrow = pb.Cast(dtype=tensor_pb2.DTYPE_FLOAT16, only_float32=True)
    assert cast_from_wire("cast", narrow) == Cast(torch.float16, only_float32=True)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pb.Cast(), ErrorReason.INVALID_TENSOR),
        (pb.Cast(dtype=tensor_pb2.DTYPE_FLOAT64), ErrorReason.INVALID_ARGUMENT),
        (pb.Cast(dtype=tensor_pb2.DTYPE_FLOAT16, is_per_channel=True), ErrorReason.INVALID_ARGUMENT),
    ],
)
def test_a_cast_that_is_none_is_refused(message: pb.Cast, reason: ErrorReason) -> None:
    with pytest.raises(ServiceError, match=r"taps\[0\]\.cast") as refused:
        cast_from_wire("taps[0].cast", message)
    assert refused.value.reason is reason


def test_a_tap_carries_its_reductions_and_its_cast() -> None:
    cast = pb.Cast(dtype=tensor_pb2.DTYPE_BFLOAT16)
    request = tap_request("taps[0]", tap_pb2.Tap(selector="fc", reductions=[WHOLE[-2][0]], cast=cast))
    assert (request.reductions, request.cast) == ((TopK(5),), Cast(torch.bfloat16))
    plain = tap_request("taps[0]", tap_pb2.Tap(selector="fc"))
    assert (plain.reductions, plain.cast) == ((), None)


def test_a_cast_of_values_that_stay_away_is_refused() -> None:
    cast: Any = pb.Cast(dtype=tensor_pb2.DTYPE_BFLOAT16)
    with pytest.raises(ServiceError, match=r"taps\[0\]\.cast"):
        tap_request(
            "taps[0]",
            tap_pb2.Tap(selector="fc", statistics=[statistics_pb2.STATISTIC_MEAN], values=False, cast=cast),
        )
