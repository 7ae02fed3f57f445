"""From a request to a plan: what is taken over, and every refusal with its field."""

from typing import Any

import pytest
import torch

from tests.support.wire.wire import request, tensor
from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import statistics_pb2, tap_pb2, tensor_pb2
from trocar_server.config import Limits
from trocar_server.engine.request.plan import ImageInput, ImageSpec, Plan, TensorInput
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.extract_requests import to_plan
from trocar_server.rpc.codec.statistics import SCOPES, STATISTICS
from trocar_server.tensors.stats import Scope, Statistic, StatisticParameters

LIMITS = Limits(
    max_request_bytes=1 << 20, max_chunk_bytes=1 << 16, max_batch=64, max_taps=4, max_image_pixels=10_000
)


def planned(**fields: Any) -> Plan:
    return to_plan(request(**fields), LIMITS)[0]


def images(*entries: pb.Image) -> pb.Input:
    return pb.Input(images=pb.ImageBatch(images=entries))


def raw(height: int, width: int) -> pb.Image:
    return pb.Image(raw=pb.RawImage(height=height, width=width))


def _tap(**fields: Any) -> tap_pb2.Tap:
    return tap_pb2.Tap(selector="x", **fields)


def refused(**fields: Any) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        planned(**fields)
    return caught.value


def test_a_tap_without_fields_wants_values_and_no_statistics() -> None:
    (tap,) = planned().taps
    assert (tap.alias, tap.values, tap.statistics, tap.scope, tap.channel_dim) == (
        "",
        True,
        (),
        Scope.ALL,
        None,
    )


def test_a_tap_keeps_all_that_it_says() -> None:
    wire = tap_pb2.Tap(
        selector="fc/in",
        alias="x",
        values=False,
        statistics=[statistics_pb2.STATISTIC_STD, statistics_pb2.STATISTIC_MEAN],
        scope=statistics_pb2.STATISTIC_SCOPE_CHANNEL,
        channel_dim=-1,
    )
    (tap,) = planned(taps=[wire]).taps
    assert (tap.selector.text, tap.alias, tap.values, tap.scope, tap.channel_dim) == (
        "fc/in",
        "x",
        False,
        Scope.CHANNEL,
        -1,
    )
    assert tap.statistics == (Statistic.STD, Statistic.MEAN)


def test_inputs_keep_name_dtype_and_shape() -> None:
    plan = planned(inputs=[tensor((2, 3)), tensor((), tensor_pb2.DTYPE_INT64, "scale")])
    assert plan.inputs == (TensorInput("", torch.float32, (2, 3)), TensorInput("scale", torch.int64, ()))


def test_images_keep_their_forms() -> None:
    plan = planned(inputs=[images(raw(4, 5), pb.Image(encoded_byte_count=99))])
    assert plan.inputs == (ImageInput("", (ImageSpec(60, 4, 5), ImageSpec(99))),)


def test_each_tensor_and_each_image_is_one_payload() -> None:
    wire = request(
        inputs=[tensor((2, 3)), images(raw(4, 5), pb.Image(encoded_byte_count=99)), tensor((), name="x")]
    )
    assert to_plan(wire, LIMITS)[1] == [24, 60, 99, 4]


def test_chunks_are_of_a_size_that_suits_both() -> None:
    assert planned().max_chunk_bytes == 1 << 16
    assert planned(max_chunk_bytes=5000).max_chunk_bytes == 5000
    assert to_plan(request(), Limits())[0].max_chunk_bytes == 1 << 20


def test_every_statistic_and_scope_of_the_wire_has_one_of_ours() -> None:
    assert set(STATISTICS) == set(statistics_pb2.Statistic.values()) - {statistics_pb2.STATISTIC_UNSPECIFIED}
    assert set(STATISTICS.values()) == set(Statistic)
    assert set(SCOPES) == set(statistics_pb2.StatisticScope.values())
    assert set(SCOPES.values()) == set(Scope)


def test_quantiles_and_bins_are_kept() -> None:
    both = [statistics_pb2.STATISTIC_QUANTILES, statistics_pb2.STATISTIC_HISTOGRAM]
    wire = _tap(statistics=both, quantiles=[0.5, 0.0], histogram=statistics_pb2.Histogram(edges=[0, 1, 4]))
    (tap,) = planned(taps=[wire]).taps
    assert tap.parameters == StatisticParameters(quantiles=(0.5, 0.0), edges=(0.0, 1.0, 4.0))
    wire = _tap(statistics=both[1:], histogram=statistics_pb2.Histogram(bin_count=7))
    assert planned(taps=[wire]).taps[0].parameters == StatisticParameters(bin_count=7)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"statistics": [14]}, "quantiles"),
        ({"quantiles": [0.5]}, "quantiles"),
        ({"statistics": [14], "quantiles": [0.5, 1.5]}, "quantiles"),
        ({"statistics": [14], "quantiles": [float("nan")]}, "quantiles"),
        ({"statistics": [14], "quantiles": [0.5] * 1025}, "quantiles"),
        ({"histogram": {}}, "histogram"),
        ({"histogram": {"bin_count": 5}}, "histogram"),
        ({"statistics": [15], "histogram": {"bin_count": 0}}, "histogram.bin_count"),
        ({"statistics": [15], "histogram": {"bin_count": -1}}, "histogram.bin_count"),
        ({"statistics": [15], "histogram": {"bin_count": 65_537}}, "histogram.bin_count"),
        ({"statistics": [15], "histogram": {"bin_count": 5, "edges": [0, 1]}}, "histogram"),
        ({"statistics": [15], "histogram": {"edges": [1]}}, "histogram.edges"),
        ({"statistics": [15], "histogram": {"edges": [1, 1]}}, "histogram.edges"),
        ({"statistics": [15], "histogram": {"edges": [0, float("inf")]}}, "histogram.edges"),
        ({"statistics": [16]}, "statistics"),
        ({"statistics": [16], "scope": 3}, "statistics"),
        ({"statistics": [17], "scope": 2}, "statistics"),
    ],
)
def test_statistics_that_do_not_go_with_the_rest_are_refused(fields: dict[str, Any], field: str) -> None:
    error = refused(taps=[_tap(**fields)])
    assert error.reason is ErrorReason.INVALID_ARGUMENT
    assert error.details["field"] == f"taps[0].{field}"
    assert error.message.startswith(f"taps[0].{field}: ")


INVALID = ErrorReason.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"model_id": ""}, INVALID, "model_id"),
        ({"taps": []}, INVALID, "taps"),
        ({"taps": [tap_pb2.Tap(selector="x")] * 5}, INVALID, "taps"),
        ({"inputs": []}, INVALID, "inputs"),
        ({"inputs": [pb.Input()]}, INVALID, "inputs[0]"),
        ({"inputs": [tensor((1,)), pb.Input(name="x")]}, INVALID, "inputs[1]"),
        ({"inputs": [tensor((1,), name="x"), tensor((1,))]}, INVALID, "inputs"),
        ({"inputs": [tensor((1,), name="x")] * 2}, INVALID, "inputs"),
        ({"max_chunk_bytes": 0}, INVALID, "max_chunk_bytes"),
        ({"max_chunk_bytes": -1}, INVALID, "max_chunk_bytes"),
        ({"max_chunk_bytes": 4095}, INVALID, "max_chunk_bytes"),
        ({"max_chunk_bytes": (1 << 16) + 1}, INVALID, "max_chunk_bytes"),
        ({"taps": [tap_pb2.Tap(selector="x" * 1025)]}, INVALID, "taps[0]"),
        ({"taps": [tap_pb2.Tap(selector="x", alias="y" * 1025)]}, INVALID, "taps[0]"),
        ({"taps": [tap_pb2.Tap(selector="x"), tap_pb2.Tap(selector="x", values=False)]}, INVALID, "taps[1]"),
        ({"taps": [_tap(statistics=[0])]}, INVALID, "taps[0].statistics"),
        ({"taps": [_tap(statistics=[1, 99])]}, INVALID, "taps[0].statistics"),
        ({"taps": [_tap(statistics=[-1])]}, INVALID, "taps[0].statistics"),
        ({"taps": [_tap(scope=9)]}, INVALID, "taps[0].scope"),
        ({"taps": [tap_pb2.Tap(selector="x]")]}, ErrorReason.INVALID_SELECTOR, None),
        ({"taps": [tap_pb2.Tap()]}, ErrorReason.INVALID_SELECTOR, None),
        ({"inputs": [tensor((1,), 0)]}, ErrorReason.INVALID_TENSOR, "inputs[0].tensor"),
        ({"inputs": [tensor((1,), 99)]}, ErrorReason.INVALID_TENSOR, "inputs[0].tensor"),
        ({"inputs": [tensor((1, -1))]}, ErrorReason.INVALID_TENSOR, "inputs[0].tensor"),
        ({"inputs": [tensor((1,) * 9)]}, ErrorReason.INVALID_TENSOR, "inputs[0].tensor"),
        ({"inputs": [tensor((0, 3))]}, ErrorReason.EMPTY_BATCH, "inputs[0].tensor"),
        ({"inputs": [images()]}, ErrorReason.EMPTY_BATCH, "inputs[0].images"),
        ({"inputs": [tensor((65, 3))]}, ErrorReason.REQUEST_TOO_LARGE, "inputs[0].tensor"),
        ({"inputs": [images(*[raw(1, 1)] * 65)]}, ErrorReason.REQUEST_TOO_LARGE, "inputs[0].images"),
        ({"inputs": [images(pb.Image())]}, ErrorReason.INVALID_IMAGE, "inputs[0].images[0]"),
        (
            {"inputs": [images(pb.Image(encoded_byte_count=0))]},
            ErrorReason.INVALID_IMAGE,
            "inputs[0].images[0]",
        ),
        (
            {"inputs": [images(pb.Image(encoded_byte_count=-5))]},
            ErrorReason.INVALID_IMAGE,
            "inputs[0].images[0]",
        ),
        ({"inputs": [images(raw(1, 1), raw(0, 5))]}, ErrorReason.INVALID_IMAGE, "inputs[0].images[1]"),
        ({"inputs": [images(raw(5, -1))]}, ErrorReason.INVALID_IMAGE, "inputs[0].images[0]"),
        ({"inputs": [images(raw(101, 100))]}, ErrorReason.IMAGE_TOO_LARGE, "inputs[0].images[0]"),
        ({"inputs": [images(raw(2**31 - 1, 2**31 - 1))]}, ErrorReason.IMAGE_TOO_LARGE, "inputs[0].images[0]"),
    ],
)
def test_what_is_wrong_is_refused_with_its_field(
    fields: dict[str, Any], reason: ErrorReason, field: str | None
) -> None:
    error = refused(**fields)
    assert error.reason is reason
    assert error.details.get("field") == field
    assert field is None or error.message.startswith(field)


@pytest.mark.parametrize(
    "inputs",
    [
        [tensor((1, (1 << 18) + 1))],
        [tensor((1, 1 << 18)), tensor((1,), name="x")],
        [tensor((1, 2**62, 2**62))],
        [images(pb.Image(encoded_byte_count=1 << 20), raw(1, 1))],
        [images(pb.Image(encoded_byte_count=2**63 - 1), pb.Image(encoded_byte_count=2**63 - 1))],
    ],
)
def test_inputs_over_the_limit_are_refused_with_both_numbers(inputs: list[pb.Input]) -> None:
    error = refused(inputs=inputs)
    assert error.reason is ErrorReason.REQUEST_TOO_LARGE
    assert int(error.details["byte_count"]) > int(error.details["limit"]) == 1 << 20


def test_inputs_of_exactly_the_limit_are_taken() -> None:
    assert planned(inputs=[tensor((1, 1 << 18))]).inputs


def test_a_statistic_asked_for_again_and_again_does_not_swell_the_reply() -> None:
    """A message of 10 MiB has room for ten million of them, and each comes back as nine bytes or more."""
    wire = tap_pb2.Tap(selector="x", statistics=[statistics_pb2.STATISTIC_MEAN] * 1000)
    try:
        (tap,) = planned(taps=[wire]).taps
    except ServiceError as error:
        assert error.reason is ErrorReason.INVALID_ARGUMENT  # noqa: PT017 - either answer is right
    else:
        assert len(tap.statistics) <= len(Statistic)


def test_the_number_of_arguments_is_limited() -> None:
    """A message of 10 MiB has room for a million empty tensors."""
    assert refused(inputs=[tensor((1, 0))] * 10_000).reason is ErrorReason.INVALID_ARGUMENT


def test_an_endless_keyword_is_refused() -> None:
    assert refused(inputs=[tensor((1,), name="x" * 100_000)]).reason is ErrorReason.INVALID_ARGUMENT
