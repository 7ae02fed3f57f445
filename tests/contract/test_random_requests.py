"""Whatever bytes come in, the answer is a reply or an error with a reason: never INTERNAL or UNKNOWN."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trocar
from tests.support.files.scale import count
from tests.support.oracles.oracle import noise
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import RunningServer
from tests.support.wire.wire import chunk, extract_call, raw_channel, tensor, unary_call
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import model_pb2, reduction_pb2, statistics_pb2, tap_pb2, tensor_pb2

EXAMPLES = count(1000, "TROCAR_FUZZ_EXAMPLES")
_INT32, _INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
_TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
_FINE_SELECTORS = [
    "conv",
    "relu@*",
    "relu@-1",
    "fc/in",
    "/in",
    "/out",
    "**",
    "*:Conv2d",
    "/out[0]",
    "identity",
    "both",
    "split[0]",
]
_ODD_SELECTORS = [
    "relu",
    "unused",
    "nowhere",
    "conv[",
    "conv@99",
    "count",
    "split[1]",
    "/in(bias)",
    "**@9",
    "/",
]


def _rarely(odd: st.SearchStrategy[Any], usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 4).flatmap(lambda number: usual if number else odd)


_SHAPES = st.sampled_from(
    [(1, 3), (2, 3), (2, 3, 8, 8), (1, 3, 8, 8), (1, 4, 8, 8), (), (3,), (0, 3), (1, 0), (1, 2**62, 0)]
)
_SPECS = st.builds(
    tensor_pb2.TensorSpec,
    dtype=_rarely(_INT32, st.sampled_from([1, 1, 1, 2, 4, 5, 9, 10, 11])),
    shape=_rarely(st.lists(_INT64, max_size=10), _SHAPES),
)
_IMAGES = st.builds(pb.Image, encoded_byte_count=_rarely(_INT64, st.integers(1, 100))) | st.builds(
    pb.Image,
    raw=st.builds(pb.RawImage, height=_rarely(_INT32, st.integers(1, 9)), width=_INT32 | st.integers(1, 9)),
)
_INPUTS = st.builds(
    pb.Input, name=_rarely(_TEXT | st.sampled_from(["self", "bias", "x"]), st.just("")), tensor=_SPECS
) | _rarely(
    st.just(pb.Input())
    | st.builds(pb.Input, images=st.builds(pb.ImageBatch, images=st.lists(_IMAGES, max_size=3))),
    st.builds(pb.Input, tensor=_SPECS),
)
_POSITIONS = _rarely(st.lists(_INT64, max_size=3), st.lists(st.integers(-3, 3), min_size=1, max_size=3))
_SMALL = _rarely(_INT32, st.integers(0, 4))
_SLICES = st.builds(
    reduction_pb2.IndexSlice,
    start=st.none() | _SMALL,
    stop=st.none() | _SMALL,
    step=st.none() | st.integers(-1, 3),
)
_INDEX_ITEMS = st.one_of(
    st.builds(reduction_pb2.IndexItem, position=_rarely(_INT64, st.integers(-3, 3))),
    st.builds(reduction_pb2.IndexItem, slice=_SLICES),
    st.builds(reduction_pb2.IndexItem, ellipsis=_rarely(st.just(False), st.just(True))),
    _rarely(st.just(reduction_pb2.IndexItem()), st.builds(reduction_pb2.IndexItem, position=st.just(0))),
)
_DOUBLES = _rarely(st.floats(), st.floats(0, 1))
_TENSORS = st.builds(tensor_pb2.TensorSpec, dtype=st.sampled_from([1, 1, 2, 4]), shape=_SHAPES) | _SPECS
_SPANS = st.one_of(
    st.just(reduction_pb2.TextSpan()),
    st.builds(reduction_pb2.TextSpan, text=_TEXT),
    st.builds(reduction_pb2.TextSpan, role=_TEXT),
    st.builds(
        reduction_pb2.TextSpan, characters=st.builds(reduction_pb2.CharacterRange, start=_SMALL, stop=_SMALL)
    ),
)
_REDUCTIONS = st.one_of(
    st.just(reduction_pb2.Reduction()),
    st.builds(reduction_pb2.IndexReduction, items=st.lists(_INDEX_ITEMS, max_size=4)).map(
        lambda kind: reduction_pb2.Reduction(index=kind)
    ),
    st.builds(reduction_pb2.TakeReduction, axis=_SMALL, positions=_POSITIONS).map(
        lambda kind: reduction_pb2.Reduction(take=kind)
    ),
    st.builds(reduction_pb2.CropReduction, top=_SMALL, left=_SMALL, height=_SMALL, width=_SMALL).map(
        lambda kind: reduction_pb2.Reduction(crop=kind)
    ),
    st.builds(
        reduction_pb2.PoolReduction,
        kind=_SMALL,
        size=st.lists(_SMALL, max_size=3),
        power=st.none() | _DOUBLES,
    ).map(lambda kind: reduction_pb2.Reduction(pool=kind)),
    st.builds(
        reduction_pb2.TopKReduction, k=_SMALL, dim=st.none() | st.integers(-4, 4), is_smallest=st.booleans()
    ).map(lambda kind: reduction_pb2.Reduction(top_k=kind)),
    st.just(reduction_pb2.Reduction(peak=reduction_pb2.PeakReduction())),
    st.builds(reduction_pb2.GramReduction, is_normalized=st.booleans()).map(
        lambda kind: reduction_pb2.Reduction(gram=kind)
    ),
    st.builds(reduction_pb2.GridReduction, height=_SMALL, width=_SMALL, prefix_count=_SMALL).map(
        lambda kind: reduction_pb2.Reduction(grid=kind)
    ),
    st.lists(_SPANS, max_size=2).map(
        lambda spans: reduction_pb2.Reduction(spans=reduction_pb2.SpanReduction(spans=spans))
    ),
    st.builds(reduction_pb2.ProjectionReduction, component_count=_SMALL, seed=_INT64).map(
        lambda kind: reduction_pb2.Reduction(projection=kind)
    ),
    st.builds(reduction_pb2.PcaReduction, components=_TENSORS, mean=st.none() | _TENSORS).map(
        lambda kind: reduction_pb2.Reduction(pca=kind)
    ),
)
_PICKS = st.builds(tap_pb2.Pick, position=_rarely(_INT64, st.integers(-2, 2))) | st.builds(
    tap_pb2.Pick, key=_TEXT | st.sampled_from(["out", "aux"])
)
_PARTS = st.builds(
    tap_pb2.SelectorParts,
    kind=_SMALL | st.integers(0, 5),
    path=_rarely(
        _TEXT, st.sampled_from(["conv", "relu", "*", "**", "", "fc", "identity", "(conv|fc)", "add"])
    ),
    type=_rarely(_TEXT, st.sampled_from(["", "Conv2d"])),
    call=st.none() | _rarely(_INT32, st.integers(-2, 2)),
    is_every_call=st.booleans(),
    port=_rarely(_TEXT, st.sampled_from(["", "out", "in", "param(weight)", "in(bias)", "scores"])),
    picks=st.lists(_PICKS, max_size=2),
)
_HISTOGRAMS = st.builds(
    statistics_pb2.Histogram,
    edges=st.lists(st.floats(), max_size=4) | st.just([0.0, 0.5, 1.0]),
    bin_count=st.none() | _INT32 | st.integers(1, 9),
)
_PLAIN_TAPS = st.builds(
    tap_pb2.Tap,
    selector=_rarely(_TEXT | st.sampled_from(_ODD_SELECTORS), st.sampled_from(_FINE_SELECTORS)),
    alias=_rarely(_TEXT, st.just("")),
    values=st.none() | st.booleans(),
    statistics=_rarely(st.lists(_INT32, max_size=3), st.lists(st.integers(1, 10), max_size=3)),
    scope=_rarely(_INT32, st.integers(0, 3)),
    channel_dim=_rarely(_INT32, st.none() | st.integers(-4, 4)),
)


def _with_more(tap: tap_pb2.Tap, data: tuple[Any, ...]) -> tap_pb2.Tap:
    """Add the fields that few taps have; statistics get what they need, where it was drawn."""
    parts, reductions, cast, quantiles, histogram, more = data
    tap.reductions.extend(reductions)
    tap.statistics.extend(more)
    if parts is not None:
        tap.parts.CopyFrom(parts)
        tap.selector = tap.selector if len(tap.alias) == 5 else ""
    if cast is not None:
        tap.cast.CopyFrom(cast)
    if quantiles is not None:
        tap.quantiles.extend(quantiles)
        tap.statistics.append(statistics_pb2.STATISTIC_QUANTILES)
    if histogram is not None:
        tap.histogram.CopyFrom(histogram)
        tap.statistics.append(statistics_pb2.STATISTIC_HISTOGRAM)
    return tap


_TAPS = st.builds(
    _with_more,
    _PLAIN_TAPS,
    st.tuples(
        _rarely(_PARTS, st.none()),
        st.lists(_REDUCTIONS, max_size=2) | st.just([]),
        st.none()
        | st.builds(
            reduction_pb2.Cast,
            dtype=_SMALL | st.integers(3, 6),
            is_per_channel=st.booleans(),
            only_float32=st.booleans(),
        ),
        _rarely(st.lists(_DOUBLES, max_size=3), st.none()),
        _rarely(_HISTOGRAMS, st.none()),
        st.lists(st.integers(11, 18).filter(lambda kind: kind not in (14, 15)), max_size=2) | st.just([]),
    ),
)
_STARTS = _rarely(
    _TEXT | st.sampled_from(_ODD_SELECTORS),
    st.sampled_from(["conv", "relu@0", "relu@1", "fc/in", "/in", "/out", "fx:add", "fn:relu@0", "identity"]),
)
_HEADS = st.builds(
    pb.ExtractRequest,
    model_id=_rarely(
        _TEXT, st.sampled_from(["plain", "structured", "identity", "data-dependent", "deep", "half"])
    ),
    taps=st.lists(_TAPS, max_size=4),
    inputs=_rarely(st.lists(_INPUTS, max_size=3), st.lists(_INPUTS, min_size=1, max_size=1)),
    max_chunk_bytes=_rarely(_INT32, st.none() | st.just(4096)),
    start_at=_rarely(_STARTS, st.just("")),
    start_inputs=_rarely(st.lists(_SPECS, max_size=2), st.just([])),
)


def _with_bytes(head: pb.ExtractRequest) -> pb.ExtractRequest:
    """Add the bytes that the head promises, where that can be."""
    operands = [spec for tap in head.taps for step in tap.reductions for spec in _constants(step)]
    for index, spec in enumerate([*(entry.tensor for entry in head.inputs), *operands]):
        size = {1: 4, 2: 8, 4: 2, 5: 1, 9: 8, 10: 1, 11: 8}.get(spec.dtype, 0)
        for side in spec.shape:
            size *= side
        if 0 < size < 1 << 16:
            head.chunks.append(chunk(noise(size).tobytes()[:size], index))
    return head


def _constants(step: reduction_pb2.Reduction) -> list[tensor_pb2.TensorSpec]:
    if not step.HasField("pca"):
        return []
    return [step.pca.components, *([step.pca.mean] if step.pca.HasField("mean") else [])]


_CHUNKS = st.builds(
    tensor_pb2.TensorChunk,
    payload_index=_rarely(_INT32, st.integers(0, 2)),
    offset_bytes=_rarely(_INT64, st.just(0)),
    data=st.binary(max_size=40),
)
_REQUESTS = _HEADS.map(_with_bytes) | st.builds(
    lambda head, chunks: pb.ExtractRequest(chunks=chunks) if head is None else _joined(head, chunks),
    st.none() | _HEADS,
    st.lists(_CHUNKS, max_size=3),
)


def _joined(head: pb.ExtractRequest, chunks: list[tensor_pb2.TensorChunk]) -> pb.ExtractRequest:
    head.chunks.extend(chunks)
    return head


def answer(channel: grpc.Channel, messages: list[bytes]) -> grpc.StatusCode:
    call = extract_call(channel, messages)
    try:
        for message in call:
            pb.ExtractResponse.FromString(message)
    except grpc.RpcError:
        pass
    code: grpc.StatusCode = call.code()
    return code


def unary_answer(channel: grpc.Channel, method: str, message: bytes) -> grpc.StatusCode:
    try:
        unary_call(channel, method, message)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


DEFECTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}
relaxed = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    deadline=None,
)


@pytest.fixture(scope="module")
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with raw_channel(server.address) as opened:
        yield opened


@relaxed
@given(_REQUESTS)
def test_no_request_is_answered_with_a_defect(channel: grpc.Channel, request: pb.ExtractRequest) -> None:
    assert answer(channel, [request.SerializeToString()]) not in DEFECTS


@relaxed
@given(st.lists(_REQUESTS, max_size=3), st.data())
def test_no_cut_or_bent_message_is_answered_with_a_defect(
    channel: grpc.Channel, requests: list[pb.ExtractRequest], data: st.DataObject
) -> None:
    messages = [request.SerializeToString() for request in requests]
    index = data.draw(st.integers(0, max(0, len(messages) - 1)))
    if messages and messages[index]:
        position = data.draw(st.integers(0, len(messages[index]) - 1))
        bent = bytearray(messages[index])
        bent[position] = data.draw(st.integers(0, 255))
        messages[index] = bytes(bent) if data.draw(st.booleans()) else messages[index][:position]
    assert answer(channel, messages) not in DEFECTS


@relaxed
@given(st.lists(st.binary(max_size=60), max_size=3))
def test_no_bytes_are_answered_with_a_defect(channel: grpc.Channel, messages: list[bytes]) -> None:
    assert answer(channel, messages) not in DEFECTS


@relaxed
@given(_HEADS)
def test_no_plan_is_answered_with_a_defect(channel: grpc.Channel, head: pb.ExtractRequest) -> None:
    message = pb.PlanRequest(extraction=head).SerializeToString()
    assert unary_answer(channel, "ExtractionService/Plan", message) not in DEFECTS


@settings(relaxed, max_examples=count(300))
@given(
    method=st.sampled_from(["GetModel", "UnloadModel", "ListModules"]),
    data=st.binary(max_size=30)
    | st.builds(lambda name: b"\x0a" + bytes([len(name)]) + name, st.binary(max_size=20)),
)
def test_no_bytes_of_a_unary_call_are_answered_with_a_defect(
    channel: grpc.Channel, method: str, data: bytes
) -> None:
    assert unary_answer(channel, f"ModelService/{method}", data) not in DEFECTS


@settings(relaxed, max_examples=count(300))
@given(model_id=st.sampled_from(["plain", "data-dependent", "identity"]), inputs=st.lists(_SPECS, max_size=3))
def test_no_form_of_inputs_is_answered_with_a_defect(
    channel: grpc.Channel, model_id: str, inputs: list[tensor_pb2.TensorSpec]
) -> None:
    message = model_pb2.ListModulesRequest(model_id=model_id, inputs=inputs).SerializeToString()
    assert unary_answer(channel, "ModelService/ListModules", message) not in DEFECTS


def test_a_pick_that_utf8_cannot_hold_is_answered_with_a_reason(channel: grpc.Channel) -> None:
    """JSON's escapes can spell half a surrogate pair; the error quotes the pick."""
    head = pb.ExtractRequest(
        model_id="plain", taps=[tap_pb2.Tap(selector='conv["\\ud800"]')], inputs=[tensor((1, 3, 8, 8))]
    )
    assert answer(channel, [_with_bytes(head).SerializeToString()]) is grpc.StatusCode.INVALID_ARGUMENT


def test_a_client_with_grpcs_own_limits_gets_the_reason_of_a_long_selector(server: RunningServer) -> None:
    """gRPC takes 8 KiB of metadata by default (more by chance), and percent-encodes the message."""
    head = pb.ExtractRequest(
        model_id="plain", taps=[tap_pb2.Tap(selector="é" * 1024)], inputs=[tensor((1, 3, 8, 8))]
    )
    with raw_channel(server.address, max_metadata_size=8192, absolute_max_metadata_size=8192) as strict:
        assert answer(strict, [_with_bytes(head).SerializeToString()]) is grpc.StatusCode.NOT_FOUND


def test_the_server_is_as_it_was_after_all_of_this(server: RunningServer, client: trocar.Client) -> None:
    with raw_channel(server.address) as opened:
        for _ in range(50):
            answer(opened, [b"\xff"])
    assert client.extract("identity", noise(1, 3), taps="identity")["identity"].shape == (1, 3)
    assert all(len(set(counts)) == 1 for counts in hook_counts(server).values())
