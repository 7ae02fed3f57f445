"""From an extraction to messages: head first, chunks in order, bytes as protobuf would write them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import statistics_pb2, tensor_pb2
from trocar_server.engine.request.plan import Plan, TapRequest
from trocar_server.engine.resolve.tap_outputs import Output, TapTarget
from trocar_server.engine.run.extraction import Extraction
from trocar_server.engine.run.pass_result import FeatureMap
from trocar_server.rpc.codec.replies import (
    CachedHead,
    describe_output,
    join_parts,
    reply_head,
    reply_messages,
)
from trocar_server.surgery import Leaf, Target, parse_selector
from trocar_server.tensors.stats import Scope, Statistic, StatisticsResult


def feature_map(
    name: str, values: bytes | None, result: StatisticsResult | None = None, **tap: object
) -> FeatureMap:
    target = TapTarget(
        Target(name, "layer4.0", 2, "in", (0, "x")),
        Leaf("in", (0, "x"), "Tensor", (1,), torch.uint8),
        TapRequest(parse_selector("layer4"), **tap),  # type: ignore[arg-type]
        "Bottleneck",
    )
    array = None if values is None else np.frombuffer(values, np.uint8)
    output = Output(name, target, (len(values or b""),), torch.uint8, values is not None)
    return FeatureMap(output, array, result)


def messages(
    *maps: FeatureMap, chunk_bytes: int = 4096, stopped_at: str | None = None
) -> list[pb.ExtractResponse]:
    plan = Plan("m", (TapRequest(parse_selector("layer4")),), (), chunk_bytes)
    extraction = Extraction(maps, (tuple(m.output.name for m in maps),), stopped_at, 0.25, 0.5)
    return [pb.ExtractResponse.FromString(join_parts(parts)) for parts in reply_messages(plan, extraction)]


def test_a_small_reply_is_one_message() -> None:
    (message,) = messages(feature_map("a", b"xyz"), feature_map("b", b"uv"))
    assert [chunk.data for chunk in message.chunks] == [b"xyz", b"uv"]


def test_a_large_reply_has_its_head_first() -> None:
    head, *rest = messages(feature_map("a", bytes(10_000)))
    assert not head.chunks
    assert [feature.name for feature in head.feature_maps] == ["a"]
    assert all(not message.feature_maps for message in rest)


def test_no_chunk_is_larger_than_asked_for_and_none_is_missing() -> None:
    values = np.random.default_rng(0).bytes(10_000)
    chunks = [chunk for message in messages(feature_map("a", values)) for chunk in message.chunks]
    assert max(len(chunk.data) for chunk in chunks) == 4096
    assert b"".join(chunk.data for chunk in chunks) == values
    assert [chunk.offset_bytes for chunk in chunks] == [0, 4096, 8192]


def test_payloads_are_numbered_without_those_that_stay_away() -> None:
    statistics = StatisticsResult(Scope.ALL, None, {})
    maps = (feature_map("a", b"x"), feature_map("s", None, statistics), feature_map("b", b"y"))
    (message,) = messages(*maps)
    assert [(chunk.payload_index, chunk.data) for chunk in message.chunks] == [(0, b"x"), (1, b"y")]
    assert [(feature.has_values, feature.byte_count) for feature in message.feature_maps] == [
        (True, 1),
        (False, 0),
        (True, 1),
    ]


def test_an_empty_value_has_values_and_no_chunk() -> None:
    (message,) = messages(feature_map("a", b""))
    assert message.feature_maps[0].has_values
    assert not message.chunks


def test_a_feature_map_says_where_it_comes_from() -> None:
    (message,) = messages(feature_map("alias", b"x"))
    (found,) = message.feature_maps
    assert (found.name, found.path, found.type, found.call_index) == ("alias", "layer4.0", "Bottleneck", 2)
    assert (found.port, found.pick) == ("in", '[0]["x"]')
    assert found.tensor == tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_UINT8, shape=[1])


def test_statistics_come_in_the_order_of_the_request() -> None:
    result = StatisticsResult(Scope.CHANNEL, 1, {Statistic.MEAN: [1.0, 2.0], Statistic.MIN: [-1.0, 0.0]})
    wanted = (Statistic.MIN, Statistic.MEAN)
    (message,) = messages(feature_map("a", None, result, statistics=wanted, scope=Scope.CHANNEL))
    (found,) = message.feature_maps
    assert [(entry.statistic, list(entry.values)) for entry in found.statistics] == [
        (statistics_pb2.STATISTIC_MIN, [-1.0, 0.0]),
        (statistics_pb2.STATISTIC_MEAN, [1.0, 2.0]),
    ]
    assert (found.scope, found.channel_dim) == (statistics_pb2.STATISTIC_SCOPE_CHANNEL, 1)


def test_edges_and_rank_error_come_with_their_own_statistic() -> None:
    wanted = (Statistic.MEAN, Statistic.HISTOGRAM, Statistic.QUANTILES, Statistic.COVARIANCE)
    values = {wanted[0]: [1.0], wanted[1]: [3.0, 4.0], wanted[2]: [0.5], wanted[3]: []}
    result = StatisticsResult(Scope.CHANNEL, 1, values, edges=(0.0, 1.0, 2.0), rank_error=0.25)
    (message,) = messages(feature_map("a", None, result, statistics=wanted, scope=Scope.CHANNEL))
    (found,) = message.feature_maps
    assert list(found.statistics) == [
        statistics_pb2.StatisticResult(statistic=statistics_pb2.STATISTIC_MEAN, values=[1.0]),
        statistics_pb2.StatisticResult(
            statistic=statistics_pb2.STATISTIC_HISTOGRAM, values=[3.0, 4.0], edges=[0.0, 1.0, 2.0]
        ),
        statistics_pb2.StatisticResult(
            statistic=statistics_pb2.STATISTIC_QUANTILES, values=[0.5], rank_error=0.25
        ),
        statistics_pb2.StatisticResult(statistic=statistics_pb2.STATISTIC_COVARIANCE),
    ]


@pytest.mark.parametrize("stopped_at", [None, "layer4", ""])
def test_where_the_pass_stopped_is_told_apart_from_not_at_all(stopped_at: str | None) -> None:
    (message,) = messages(feature_map("a", b"x"), stopped_at=stopped_at)
    assert message.HasField("stopped_at") is (stopped_at is not None)
    assert message.stopped_at == (stopped_at or "")


def test_time_and_expansions_are_in_the_head() -> None:
    (message,) = messages(feature_map("a", b"x"))
    assert message.timing == pb.ServerTiming(queue_s=0.25, compute_s=0.5)
    assert list(message.expansions) == [pb.SelectorExpansion(selector="layer4", names=["a"])]


@pytest.mark.parametrize(
    ("port", "expected"),
    [
        ("out", "grad_out"),
        ("in", "grad_in"),
        ("in(x)", "grad_in(x)"),
        ("param(weight)", "param_grad(weight)"),
    ],
)
def test_the_port_of_a_gradient_says_so(port: str, expected: str) -> None:
    output = feature_map("a", b"x").output
    for is_gradient, shown in ((True, expected), (False, port)):
        target = Target("a", "fc", 0, port, is_gradient=is_gradient)
        source = replace(output.source, target=target)
        assert describe_output(replace(output, source=source)).port == shown


def test_what_edits_became_and_the_objective_are_in_the_head() -> None:
    plan = Plan("m", (), (), 1)
    edits = (("conv*", ("conv1", "conv2")), ("fc", ("fc",)))
    extraction = Extraction((), (), None, 0, 0, edit_expansions=edits, objective_value=0.0)
    head = reply_head(plan, extraction)
    assert [(found.selector, tuple(found.names)) for found in head.edit_expansions] == list(edits)
    assert head.HasField("objective_value")
    assert not reply_head(plan, replace(extraction, objective_value=None)).HasField("objective_value")


def _alone(plan: Plan, extraction: Extraction) -> pb.ExtractResponse:
    return pb.ExtractResponse.FromString(b"".join(map(join_parts, reply_messages(plan, extraction))))


def test_a_reply_of_the_form_of_the_last_one_says_what_it_would_say_alone() -> None:
    plan = Plan("m", (TapRequest(parse_selector("layer4")),), (), 4096)
    one = feature_map("a", b"xyz")
    base = Extraction((one,), (("a",),), "layer4", 0.25, 0.5)
    other_source = replace(
        one, output=replace(one.output, source=replace(one.output.source, type_name="ReLU"))
    )
    longer = replace(one, output=replace(one.output, shape=(4,)), values=np.frombuffer(b"wxyz", np.uint8))
    in_turn = [
        base,
        replace(base, feature_maps=(replace(one, values=np.frombuffer(b"abc", np.uint8)),), queue_s=0.5),
        replace(base, report=replace(base.report, row_count=7, engine="openvino")),
        replace(base, stopped_at=None),
        replace(base, feature_maps=(other_source,)),
        replace(base, feature_maps=(longer,)),
        replace(base, expansions=(("a", "b"),)),
        replace(base, edit_expansions=(("layer1", ("layer1.0",)),)),
        replace(base, objective_value=2.0),
        replace(base, objective_value=3.0),
        replace(base, feature_maps=()),
        base,
    ]
    cached = CachedHead()
    for extraction in in_turn:
        found = b"".join(map(join_parts, reply_messages(plan, extraction, cached)))
        assert pb.ExtractResponse.FromString(found) == _alone(plan, extraction)


def test_statistics_are_never_those_of_the_last_reply() -> None:
    plan = Plan("m", (TapRequest(parse_selector("layer4"), statistics=(Statistic.MEAN,)),), (), 4096)
    cached = CachedHead()
    for number in (1.0, 2.0):
        result = StatisticsResult(Scope.ALL, None, {Statistic.MEAN: [number]})
        found = feature_map("a", b"xyz", result, statistics=(Statistic.MEAN,))
        extraction = Extraction((found,), (("a",),), None, 0.25, 0.5)
        reply = b"".join(map(join_parts, reply_messages(plan, extraction, cached)))
        assert pb.ExtractResponse.FromString(reply) == _alone(plan, extraction)
